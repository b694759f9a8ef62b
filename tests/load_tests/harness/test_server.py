"""A server as a process: how it starts, what is said of one that does not, and that nothing of it stays."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from load_tests.harness.client import ServerError
from load_tests.harness.patience import patience
from load_tests.harness.server import running, write_config

# A shell's background starts programs with SIGINT ignored; launchers set it, and so does this.
WAITS = (
    "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "print('up', flush=True); time.sleep(600)"
)
LEAVES_ONE_BEHIND = f"import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); {WAITS}"


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def up(log: Path) -> Callable[[], bool]:
    return lambda: "up" in log.read_text(encoding="utf-8")


def test_a_server_is_there_once_it_is_ready_and_ends_as_by_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "log"
    asked = []

    def ready() -> bool:
        asked.append(1)
        if len(asked) == 1:
            raise httpx.ConnectError("not yet")
        return up(log)()

    with running(command(WAITS), "http://here", ready, log, patience(60)) as server:
        assert server.process.is_running()
        assert server.url == "http://here"
    assert not server.process.is_running()
    assert "KeyboardInterrupt" in log.read_text()
    assert server.left_behind == []


def test_what_outlives_a_server_is_ended_and_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(command(LEAVES_ONE_BEHIND), "", up(log), log, patience(60)) as server:
        (child,) = server.process.children()
    assert [process.pid for process in server.left_behind] == [child.pid]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_before_it_is_ready_is_told_of_by_its_last_words(tmp_path: Path) -> None:
    own = tmp_path / "own.log"
    own.write_text("its own last words\n")
    program = command("import sys; print('no model there'); sys.exit(3)")
    logs = (own, tmp_path / "never written")
    with pytest.raises(ServerError, match=r"code 3 before it was ready:\nno model there\n") as found:  # noqa: SIM117
        with running(program, "", lambda: False, tmp_path / "log", patience(60), logs):
            pytest.fail("it was never ready")
    assert "its own last words" in str(found.value)


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = f"import os; print('number', os.getpid(), flush=True); {WAITS}"
    running_one = running(command(program), "", lambda: False, log, 0.1)
    with pytest.raises(ServerError, match=r"not ready after 0\.1 s"):
        running_one.__enter__()
    number = re.search(r"number (\d+)", log.read_text())
    assert number is None or not psutil.pid_exists(int(number[1]))


def test_settings_stand_over_the_shipped_ones_and_a_merged_section_keeps_the_others(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"model": "m", "engine": {"threads": 2}, "kv": {"redis_url": None}}, ("kv",))
    args = yaml.safe_load(path.read_text())["applications"][0]["args"]
    assert args["model"] == "m"
    assert args["engine"] == {"threads": 2}
    assert args["kv"]["redis_url"] is None
    assert args["kv"]["segment_tokens"] == 256
    assert args["http"]
