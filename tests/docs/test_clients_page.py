"""The page of clients names the versions that the tests run, and each client that has a script."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable

import pages

from configs.model_folder import PROJECT_ROOT

CLIENTS = PROJECT_ROOT / "tests" / "end_to_end" / "clients"
PINS = ("requirements/cpu.txt", "tests/end_to_end/clients/requirements.txt")
ROWS = re.findall(r"^\| `([^`]+)`( for Node)? \| ([\d., ]+) \|", pages.read("docs/guide/clients.md"), re.MULTILINE)


def pinned(name: str) -> set[str]:
    """The versions of a Python package in the lock files of the server and of the clients' tests."""
    text = "\n".join(pages.read(path) for path in PINS)
    return set(re.findall(rf"^{re.escape(name)}==([\d.]+)", text, re.MULTILINE))


@pytest.mark.parametrize(("name", "node", "versions"), ROWS)
def test_the_versions_are_those_that_are_run(name: str, node: str, versions: str) -> None:
    of_node = json.loads((CLIENTS / "node" / "package.json").read_text())["dependencies"]
    run = {of_node[name]} if node or name.startswith("@") else pinned(name)
    assert set(versions.split(", ")) == run


def test_every_script_has_a_row_and_every_row_a_script() -> None:
    scripts = [*(CLIENTS / "scripts").glob("with_*.py"), *(CLIENTS / "node").glob("with_*.mjs")]
    assert len(ROWS) == len(scripts) > 0
