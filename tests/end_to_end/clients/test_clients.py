"""The clients that programs are written with: each chats, streams, calls tools, and understands a cut and an error.

Those of the project's own environment run in `make test`. `make test-long` makes an environment for the others, Node
included, from `requirements.txt` and `node/package-lock.json`, and keeps it for the next run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer
from tests.surroundings import outside

pytestmark = pytest.mark.server

HERE = Path(__file__).parent
CASES = json.loads((HERE / "cases.json").read_text())
PLACES = set(CASES["tool"]["parameters"]["properties"]["place"]["enum"])
OFFICIAL = ["with_openai", "with_openai_responses", "with_anthropic"]
SCRIPTS = sorted(path.stem for path in (HERE / "scripts").glob("with_*.py"))
NODE_SCRIPTS = sorted(path.name for path in (HERE / "node").glob("with_*.mjs"))
CUT = ("length", "max_tokens", "max_output_tokens")
"""The word of each API for an answer that its limit has cut."""
ENVIRONMENTS = PROJECT_ROOT / ".pytest_cache" / "clients"


ONE_AFTER_THE_OTHER = """
import runpy, sys
folder, url, *scripts = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv = ["", url]
for script in scripts:
    runpy.run_path(f"{folder}/{script}.py")
"""
"""Runs several scripts in one process, which imports what they share once."""


def told(*command: str | Path) -> dict[str, Any]:
    """What a script prints."""
    return printed(*command)[-1]


def printed(*command: str | Path) -> list[dict[str, Any]]:
    """What scripts print, a line each; packages may print others."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=patience(300), check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"version": ')]


def has_all(came: dict[str, Any]) -> None:
    failed = {name: one["failed"] for name, one in came.items() if isinstance(one, dict)}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert "Oslo" in came["chat"]
    assert "".join(came["stream"]) == came["chat"]  # in one piece where the engine is sooner than its reader
    assert [place in PLACES for place in came["tools"]] == [True] * CASES["steps"]
    assert came["structured"] in PLACES
    assert came["cut"] in CUT
    status, words = came["error"]
    assert (status, CASES["unknown_model"] in words) == (404, True)


@pytest.fixture(scope="module")
def environment() -> Path:
    """A folder with the clients' Python, their Node in its `bin`, and its scripts; made where it is not there."""
    locks = [HERE / "requirements.txt", HERE / "node" / "package-lock.json"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"{version}-{crc32(b''.join(path.read_bytes() for path in locks)):08x}"
    folder = ENVIRONMENTS / name
    if not (folder / "made").exists():
        shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
        python = folder / "bin" / "python"
        install("venv", "--quiet", "--python", sys.executable, str(folder))
        as_locked = ("--no-deps", "--index-strategy", "unsafe-best-match")  # as requirements/install.sh has it
        install("pip", "install", "--quiet", "--python", str(python), *as_locked, "-r", str(locks[0]))
        copied(folder)
        fetched([folder / "bin" / "npm", "ci", "--no-audit", "--no-fund"], folder / "node")
        (folder / "made").touch()
    copied(folder)
    return folder


def copied(folder: Path) -> None:
    """Node finds packages next to its scripts only."""
    shutil.copy(HERE / "cases.json", folder)
    shutil.copytree(HERE / "node", folder / "node", dirs_exist_ok=True)


def install(*arguments: str) -> None:
    """What uv does, with packages from where pip has them."""
    uv = Path(sys.executable).with_name("uv")
    script = '. requirements/sources.sh; take_sources_of_pip "$1"; shift; exec "$@"'
    fetched(["bash", "-c", script, "bash", sys.executable, uv, *arguments], PROJECT_ROOT)


def fetched(command: list[str | Path], folder: Path) -> None:
    found = {**outside(os.environ), "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=found,
        capture_output=True,
        text=True,
        timeout=patience(600),
        check=False,
    )
    assert done.returncode == 0, f"the clients cannot be installed: {done.stdout}{done.stderr}"


def test_the_official_clients_are_understood_and_understand(server: RunningServer) -> None:
    found = printed(sys.executable, "-c", ONE_AFTER_THE_OTHER, HERE / "scripts", server.url, *OFFICIAL)
    assert len(found) == len(OFFICIAL)
    for came in found:
        has_all(came)


@pytest.mark.long("tests/end_to_end/clients/test_clients.py::test_the_official_clients_are_understood_and_understand")
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_client_for_python_is(server: RunningServer, environment: Path, script: str) -> None:
    has_all(told(environment / "bin" / "python", HERE / "scripts" / f"{script}.py", server.url))


@pytest.mark.long("tests/end_to_end/clients/test_clients.py::test_the_official_clients_are_understood_and_understand")
@pytest.mark.parametrize("script", NODE_SCRIPTS)
def test_every_client_for_node_is(server: RunningServer, environment: Path, script: str) -> None:
    has_all(told(environment / "bin" / "node", environment / "node" / script, server.url))


@pytest.mark.long("tests/end_to_end/clients/test_clients.py::test_the_official_clients_are_understood_and_understand")
def test_vllms_own_benchmark_runs_as_the_page_says(server: RunningServer) -> None:
    page = (PROJECT_ROOT / "docs" / "tools" / "load_test.md").read_text()
    (command,) = re.findall(r"^vllm bench serve(?:.*\\\n)*.*$", page, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", server.url))
    wanted = words[words.index("--num-prompts") + 1]
    ran = subprocess.run(
        [Path(sys.executable).with_name("vllm"), *words[1:]],
        cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=patience(300), check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"Successful requests: +(\d+)", ran.stdout) == [wanted]
