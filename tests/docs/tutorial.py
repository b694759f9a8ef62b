"""The tutorial's commands, run as a reader runs them: one shell, block after block."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.model_folder import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "guide" / "tutorial.md"
_BLOCK = re.compile(r"^```sh\n(.*?)^```(?:\s*^```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
_END = "--the block has ended--"


@dataclass(frozen=True)
class Block:
    """`shown`: what the page says that the commands print; None where it shows nothing."""

    commands: str
    shown: str | None


def blocks() -> list[Block]:
    """The page's shell blocks, in its order."""
    return [Block(match[1], match[2]) for match in _BLOCK.finditer(PAGE.read_text())]


def run(url: str, folder: Path) -> Iterator[str]:
    """Run block after block against the server at `url`; yield what each has printed. Files go to `folder`."""
    with subprocess.Popen(
        ["bash"], cwd=PROJECT_ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        for block in blocks():
            here = block.commands.replace("http://127.0.0.1:8000", url).replace("/tmp/", f"{folder}/")
            shell.stdin.write(here.replace(".venv/bin/python", sys.executable) + f"\nprintf '\\n%s\\n' '{_END}'\n")
            shell.stdin.flush()
            yield "".join(iter(shell.stdout.readline, f"{_END}\n")).removesuffix("\n")
        shell.stdin.close()
