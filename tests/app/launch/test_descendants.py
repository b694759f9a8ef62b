"""How processes are ended: all of them, a Redis with more patience than others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.launch import descendants
from app.launch.descendants import Descendants
from load_tests.harness.patience import until

# All say that they are up with a file. After SIGTERM the first takes a second to end, the second minutes; the last
# never does.
_SCRIPT = f"#!{sys.executable}\nimport signal, sys, time\nsignal.signal(signal.SIGTERM, %s)\nopen(sys.argv[1], 'w')\n"
SLOW = _SCRIPT % "lambda *_: (time.sleep(1), sys.exit())" + "time.sleep(600)\n"
SLOWER = _SCRIPT % "lambda *_: (time.sleep(200), sys.exit())" + "time.sleep(600)\n"
STUBBORN = _SCRIPT % "signal.SIG_IGN" + "time.sleep(600)\n"

# Starts its arguments as children, waits for their files, says so, and waits.
PARENT = """
import pathlib, subprocess, sys, time
for script in sys.argv[1:]:
    subprocess.Popen([script, script + ".up"])
while not all(pathlib.Path(script + ".up").exists() for script in sys.argv[1:]):
    time.sleep(0.01)
print("up", flush=True)
time.sleep(600)
"""

Start = Callable[..., Descendants]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start scripts by name; all that are left in the end are killed."""
    monkeypatch.setattr(descendants, "TERMINATE_S", 0.3)
    parents: list[psutil.Process] = []
    family: set[psutil.Process] = set()

    def start(**scripts: str) -> Descendants:
        for name, text in scripts.items():
            path = tmp_path / name.replace("_", "-")
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        names = [str(tmp_path / name.replace("_", "-")) for name in scripts]
        parent = subprocess.Popen([sys.executable, "-c", PARENT, *names], stdout=subprocess.PIPE)
        parents.append(psutil.Process(parent.pid))
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        family.update([parents[-1], *parents[-1].children(recursive=True)])
        return Descendants(parents[-1])

    yield start
    left = [process for process in family if process.is_running() and process not in parents]
    for process in family:
        if process.is_running():
            process.kill()
    for parent in parents:
        os.waitpid(parent.pid, 0)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_redis_that_takes_its_time_ends_by_itself(start: Start) -> None:
    assert start(redis_server=SLOW, valkey_server=SLOW).end(threading.Event()) == 0


def test_other_processes_that_take_their_time_are_killed(start: Start) -> None:
    assert start(worker=SLOWER).end(threading.Event()) == 1


def test_a_redis_that_does_not_end_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "STORE_TERMINATE_S", 0.6)
    assert start(redis_server=STUBBORN).end(threading.Event()) == 1


def test_whoever_is_impatient_does_not_wait_for_a_redis(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "STORE_TERMINATE_S", 3600.0)
    impatient = threading.Event()
    impatient.set()
    assert start(redis_server=STUBBORN).end(impatient) == 1


def test_impatience_that_comes_later_counts_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "STORE_TERMINATE_S", 3600.0)
    impatient = threading.Event()
    threading.Timer(0.5, impatient.set).start()
    assert start(redis_server=STUBBORN).end(impatient) == 1


def test_those_that_were_seen_are_ended_after_their_parent(start: Start) -> None:
    family = start(worker=STUBBORN)
    family.note()
    (root,) = {process.ppid() for process in family._seen.values() if process.name() == "worker"}
    parent = psutil.Process(root)
    parent.kill()
    until(lambda: parent.status() == psutil.STATUS_ZOMBIE, "the parent has ended", 20.0)
    assert family.end(threading.Event()) == 1
