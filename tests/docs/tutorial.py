"""The tutorial's commands, run as a reader runs them: one shell, block after block."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from configs.model_folder import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "guide" / "tutorial.md"
MESSAGES = [{"role": "user", "content": f"{PAGE.with_suffix('.txt').read_text().strip()} Where does Anna live?"}]
"""The chat that the page sends."""
_ACTIVATE = "source .venv/bin/activate"
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


def run(url: str) -> Iterator[str]:
    """Run block after block against the server at `url`; yield what each has printed, without blanks at lines' ends.

    The command `crosskv` is this environment's, whether or not it is installed in one.
    """
    crosskv = f'crosskv() {{ {shlex.quote(sys.executable)} -m app.cli "$@"; }}'
    with subprocess.Popen(
        ["bash"], cwd=PROJECT_ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        for block in blocks():
            here = block.commands.replace("http://127.0.0.1:8000", url).replace(_ACTIVATE, crosskv)
            shell.stdin.write(here + f"\nprintf '\\n%s\\n' '{_END}'\n")
            shell.stdin.flush()
            printed = "".join(iter(shell.stdout.readline, f"{_END}\n")).removesuffix("\n")
            yield re.sub(r" +$", "", printed, flags=re.MULTILINE)
        shell.stdin.close()
