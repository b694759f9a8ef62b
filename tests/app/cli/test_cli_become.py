"""`crosskv serve` and `crosskv demo` are the programs of `make serve` and `make demo`, and `crosskv` is installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from stand_in import StandIn
from typer.testing import CliRunner, Result

from app.cli import main
from app.cli.main import app
from configs.model_folder import PROJECT_ROOT

P = [sys.executable, "-P", "-m"]


class BecameError(Exception):
    """What `execv` would have run."""


@pytest.fixture(autouse=True)
def _no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def execv(path: str, arguments: list[str]) -> None:
        assert path == sys.executable
        raise BecameError(arguments)

    monkeypatch.setattr(main.os, "execv", execv)


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


def test_demo_goes_to_the_server_of_the_common_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = [*P, "app.demo", "--host", "127.0.0.1", "--port", "8000"]
    assert became("demo", "--no-restart") == [*default, "--no-restart"]
    assert became("demo", CROSSKV_URL="http://[::1]:81") == [*P, "app.demo", "--host", "[::1]", "--port", "81"]
    monkeypatch.setenv("CROSSKV_API_KEY", "")
    file = tmp_path / "key"
    file.write_text("secret")
    assert became("demo", "--key-file", str(file)) == default, "the key is not where `ps` shows it"
    assert main.os.environ["CROSSKV_API_KEY"] == "secret"


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1", "http://", "http://127.0.0.1/below", "http://127.0.0.1:x", "here"]
)
def test_demo_says_which_url_it_needs(url: str) -> None:
    result = failed("demo", "--url", url)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_make_serve_and_make_demo_run_the_same_modules() -> None:
    makefile = (PROJECT_ROOT / "Makefile").read_text()
    assert "-m app.launch " in makefile
    assert "-m app.demo " in makefile


def test_a_real_process_becomes_the_demo(server: StandIn, tmp_path: Path) -> None:
    """And takes no folder of the place where it is called for the project."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "demo.py").write_text("raise SystemExit(77)")
    server.answers["/health"] = (503, {"error": {"message": "no ingress"}})
    command = [sys.executable, "-P", "-m", "app.cli", "demo", "--url", server.url, "--no-restart"]
    environment = {"PYTHONPATH": str(PROJECT_ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"The server at {server.url} is not ready; try again later.\n"


def test_the_command_is_installed_with_the_project() -> None:
    scripts = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["crosskv"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert "-e ." in (PROJECT_ROOT / "requirements" / "install.sh").read_text(), "`make` installs the project itself"
