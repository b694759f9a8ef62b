"""The note of who launched a server, and that notes which nobody removed mislead nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.launch import run_folder
from app.launch.run_folder import find_launcher, launched_from_here

PORT = 8000


@pytest.fixture(autouse=True)
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the note about the launcher lies."""
    monkeypatch.setattr(run_folder, "RUN_FOLDER", tmp_path)
    path = tmp_path / str(PORT) / "launcher.pid"
    path.parent.mkdir()
    return path


@pytest.fixture
def launcher() -> Iterator[psutil.Process]:
    """A process that is called what a launcher is called."""
    command = [sys.executable, "-c", "print(flush=True); input()", "app.launch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # only then does the system know its command line
        yield psutil.Process(process.pid)
        process.kill()


def write(note: Path, process: psutil.Process, later_s: float = 0.0) -> None:
    note.write_text(json.dumps({"pid": process.pid, "started": process.create_time() + later_s}), encoding="utf-8")


def test_a_living_launcher_is_found_by_its_port(note: Path, launcher: psutil.Process) -> None:
    write(note, launcher)
    assert find_launcher(PORT) == launcher
    assert find_launcher(PORT + 1) is None


def test_a_launcher_that_was_killed_is_not_found(note: Path, launcher: psutil.Process) -> None:
    write(note, launcher)
    launcher.kill()
    launcher.wait()
    assert find_launcher(PORT) is None


def test_a_process_that_got_the_number_later_is_not_found(note: Path, launcher: psutil.Process) -> None:
    write(note, launcher, later_s=-60.0)
    assert find_launcher(PORT) is None


def test_a_process_that_is_no_launcher_is_not_found(note: Path) -> None:
    write(note, psutil.Process())
    assert find_launcher(PORT) is None


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", '{"pid": "x", "started": 0}', '{"pid": -1, "started": 0}'])
def test_a_note_that_says_nothing_finds_nobody(note: Path, text: str) -> None:
    note.write_text(text, encoding="utf-8")
    assert find_launcher(PORT) is None


def test_the_note_is_there_while_the_launcher_runs_and_gone_afterwards(note: Path) -> None:
    note.write_text("what a killed launcher left", encoding="utf-8")
    with launched_from_here(PORT):
        assert json.loads(note.read_text(encoding="utf-8"))["pid"] == psutil.Process().pid
    assert not note.exists()


def test_the_note_of_another_launcher_is_left_alone(note: Path) -> None:
    with launched_from_here(PORT):
        note.write_text("another's", encoding="utf-8")
    assert note.read_text(encoding="utf-8") == "another's"
