"""What of the shell's Python the server's processes get, and by which path they are reached."""

from __future__ import annotations

import sys

import pytest

from app.launch.surroundings import python
from configs.settings import SettingsError


def test_variables_that_ray_does_not_start_with_are_not_handed_on_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert python.warning() is None
    for name in python.DROPPED:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    environment = python.server_environment("/place")
    assert not python.DROPPED & environment.keys()
    assert environment["PYTHONHASHSEED"] == "7"
    assert all(name in str(python.warning()) for name in python.DROPPED)


def test_the_servers_processes_read_text_as_utf_8_and_put_temporary_files_where_sockets_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    environment = python.server_environment("/place")
    assert (environment["PYTHONUTF8"], environment["TMPDIR"]) == ("1", "/place")


def test_what_the_servers_processes_compile_is_kept_for_the_next_start_which_needs_no_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in python.server_environment("/place")
    assert python.warning() is None


@pytest.mark.parametrize("path", ["/a blank/bin/python", "/it's/bin/python", "/$HOME/bin/python", "/ü/bin/python"])
def test_a_python_that_no_worker_could_be_started_by_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(sys, "executable", path)
    with pytest.raises(SettingsError, match="run `make install`"):
        python.require_plain_path()
    monkeypatch.setattr(sys, "executable", "/plain/bin/python3.11")
    python.require_plain_path()
