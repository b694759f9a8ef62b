"""Where the server's secret comes from, who can read it, and that it survives a restart."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from configs.settings import SettingsError
from deployments.protocol.secret_file import FILE_NAME, VARIABLE, server_secret
from kvmanager.segments.server_secret import ServerSecret

HEX = bytes(range(32)).hex()


def test_it_is_made_once_for_its_owner_only_and_survives_a_restart(tmp_path: Path):
    folder = tmp_path / "not" / "there yet"
    made = server_secret(folder, {})
    assert server_secret(folder, {}) == made != server_secret(tmp_path / "other", {})
    assert [entry.name for entry in folder.iterdir()] == [FILE_NAME]
    assert (folder / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_no_other_account_could_read_it_while_it_was_made(tmp_path: Path, own_records: Any):
    """It is read back at once, which closes a file that is open to others and says so."""
    server_secret(tmp_path, {})
    assert own_records() == []


def test_of_many_starts_at_once_all_take_the_same(tmp_path: Path):
    barrier, made = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        made.append(server_secret(tmp_path, {}))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert set(made) == {made[0]}


def test_the_environment_wins_and_leaves_no_file(tmp_path: Path):
    assert server_secret(tmp_path, {VARIABLE: f" {HEX}\n"}) == ServerSecret(bytes(range(32)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["short", HEX[:-2], HEX + "00", "z" * 64])
def test_a_secret_that_is_none_is_refused_and_not_shown(tmp_path: Path, wrong: str):
    with pytest.raises(SettingsError, match="openssl rand -hex 32") as error:
        server_secret(tmp_path, {VARIABLE: wrong})
    assert wrong not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe" * 40, HEX[:-1].encode()])
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, content: bytes):
    (tmp_path / FILE_NAME).write_bytes(content)
    (tmp_path / FILE_NAME).chmod(0o600)
    with pytest.raises(SettingsError, match="or delete it") as error:
        server_secret(tmp_path, {})
    assert HEX[:-1] not in str(error.value)
    assert (tmp_path / FILE_NAME).read_bytes() == content


def test_a_file_that_others_can_read_is_closed_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / FILE_NAME).write_text(HEX)
    (tmp_path / FILE_NAME).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert server_secret(tmp_path, {}) == ServerSecret(bytes(range(32)))
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert "could be read by others" in caplog.text
    assert HEX not in caplog.text


def test_where_nothing_can_be_written_the_start_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        server_secret(tmp_path / "file" / "folder", {})
    assert VARIABLE in caplog.text
