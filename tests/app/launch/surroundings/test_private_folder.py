"""Where the server's sockets lie, whatever TMPDIR says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.launch.surroundings import folder
from configs.settings import SettingsError


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one of `PLACES`, whose path is short enough; others are longer by 40 bytes at most."""
    made = tmp_path / "good"
    made.mkdir()
    monkeypatch.setattr(folder, "PLACES", (str(tmp_path / "missing"), str(made)))
    monkeypatch.setattr(folder, "LONGEST_BYTES", len(os.fsencode(tmp_path)) + 60)
    return made


def test_a_short_plain_folder_is_used_and_nothing_is_said(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = good.with_name("wanted")
    wanted.mkdir()
    monkeypatch.setenv("TMPDIR", str(wanted))
    made = folder.private_folder()
    assert made.parent == wanted
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert folder.warning() is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a" * 60, "too long"),
        ("with blank", "quotes"),
        ("with$dollar", "quotes"),
        ("with'quote", "quotes"),
        ("ünicode", "quotes"),
        ("", "too long"),
    ],
)
def test_one_that_does_not_do_is_replaced_and_that_is_said(
    good: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    wanted = good.with_name(name or "b" * 70)
    wanted.mkdir()
    monkeypatch.setenv("TMPDIR", str(wanted))
    assert folder.private_folder().parent == good
    warning = folder.warning()
    assert warning is not None
    assert said in warning
    assert str(wanted) in warning
    assert str(good) in warning


@pytest.mark.parametrize("wanted", ["/nonexistent", "relative", "/dev/null"])
def test_one_that_is_not_there_is_replaced(good: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("TMPDIR", wanted)
    assert folder.place() == str(good)
    assert folder.warning() is not None


def test_one_that_cannot_be_written_is_replaced(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = good.with_name("wanted")
    wanted.mkdir()
    monkeypatch.setenv("TMPDIR", str(wanted))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(wanted))  # root may write anywhere
    assert folder.place() == str(good)
    assert "not writable" in str(folder.warning())


def test_where_none_does_a_sentence_says_what_would(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    good.rmdir()
    with pytest.raises(
        SettingsError, match=r"^TMPDIR: .*/nonexistent \(not there\).* set TMPDIR to a folder of at most"
    ):
        folder.private_folder()
