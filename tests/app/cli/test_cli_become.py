"""`crosskv serve` is the program of `make serve`, `crosskv demo` that of `make demo`, and `crosskv` is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from stand_in import StandIn
from typer.testing import CliRunner, Result

from app.cli.__main__ import app
from configs.model_folder import PROJECT_ROOT

P = [sys.executable, "-P", "-m"]


class BecameError(Exception):
    """What `execv` would have run."""


@pytest.fixture(autouse=True)
def _no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def execv(path: str, arguments: list[str]) -> None:
        assert path == sys.executable
        raise BecameError(arguments)

    monkeypatch.setattr(os, "execv", execv)


def became(*arguments: str, **more: str) -> list[str]:
    result = CliRunner().invoke(app, list(arguments), env=more)
    assert isinstance(result.exception, BecameError), result.output
    return list(result.exception.args[0])


def failed(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, SystemExit)
    return result


def test_serve_hands_everything_to_the_launcher() -> None:
    assert became("serve") == [*P, "app.launch"]
    given = ["mine.yaml", "--port", "8001", "--help", "--model=x"]
    assert became("serve", *given) == [*P, "app.launch", *given]


def test_make_serve_and_make_demo_run_the_same_modules() -> None:
    makefile = (PROJECT_ROOT / "Makefile").read_text()
    assert "-m app.launch " in makefile
    assert "-m app.cli demo " in makefile


def test_a_real_process_takes_no_folder_of_its_place_for_the_project(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "cli.py").write_text("raise SystemExit(77)")
    server.answers["/health"] = (503, {"error": {"message": "no ingress"}})
    command = [sys.executable, "-P", "-m", "app.cli", "demo", "--url", server.url]
    environment = {"PYTHONPATH": str(PROJECT_ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"The server at {server.url} is starting or ending: no ingress answers yet.\n"


def test_the_command_is_installed_with_the_project() -> None:
    scripts = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["crosskv"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert "-e ." in (PROJECT_ROOT / "requirements" / "install.sh").read_text(), "`make` installs the project itself"
