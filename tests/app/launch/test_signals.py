"""What a signal means to the launcher, in a process of its own, with a terminal that can close."""

from __future__ import annotations

import itertools
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.launch import signals as module
from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience, until

LIMIT_S = 20.0

# Writes what it was asked for, one word a line.
LISTENER = """
import sys
from app.launch import signals as module
module._CLOSING_S = float(sys.argv[2])
signals = module.Signals()
said = open(sys.argv[1], "w", buffering=1)
said.write("ready\\n")
while not signals.wait_for_stop(0.05):
    was_hung_up = signals._hung_up
    if signals.take_restart():
        said.write("restart\\n")
    elif was_hung_up:
        said.write("hangup\\n")
said.write("stop\\n")
while not signals.impatient.wait(1):
    pass
said.write("impatient\\n")
"""
COMMAND = [sys.executable, "-c", LISTENER]


def wait_for(said: Path, *words: str) -> None:
    until(
        lambda: said.exists() and said.read_text(encoding="utf-8").split() == list(words),
        f"it says {' '.join(words)}",
        LIMIT_S,
    )


@pytest.fixture
def said(tmp_path: Path) -> Path:
    return tmp_path / "said"


@pytest.fixture
def without_terminal(said: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*COMMAND, str(said), "5"], cwd=PROJECT_ROOT, start_new_session=True) as process:
        wait_for(said, "ready")
        yield process
        process.kill()


def in_a_terminal(said: Path, *before: str, closing_s: float = 5.0) -> tuple[int, int]:
    """Start a listener that leads the session of a new terminal. Returns its number, and the terminal to be closed."""
    number, terminal = pty.fork()
    if number == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests themselves run under nohup
        os.chdir(PROJECT_ROOT)
        command = [*before, *COMMAND, str(said), str(closing_s)]
        os.execvp(command[0], command)
    wait_for(said, "ready")
    return number, terminal


def test_each_sighup_asks_for_one_restart(without_terminal: subprocess.Popen[bytes], said: Path) -> None:
    without_terminal.send_signal(signal.SIGHUP)
    wait_for(said, "ready", "restart")
    without_terminal.send_signal(signal.SIGHUP)
    wait_for(said, "ready", "restart", "restart")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_to_stop_is_impatient_and_a_sighup_between_is_not(
    without_terminal: subprocess.Popen[bytes], said: Path, number: signal.Signals
) -> None:
    without_terminal.send_signal(number)
    wait_for(said, "ready", "stop")
    without_terminal.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    wait_for(said, "ready", "stop")
    without_terminal.send_signal(number)
    wait_for(said, "ready", "stop", "impatient")


def test_a_terminal_that_closes_asks_for_a_stop(said: Path) -> None:
    number, terminal = in_a_terminal(said)
    try:
        os.close(terminal)
        wait_for(said, "ready", "hangup", "stop")
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def test_sighup_restarts_in_a_terminal_that_is_still_there(said: Path) -> None:
    number, terminal = in_a_terminal(said)
    try:
        os.kill(number, signal.SIGHUP)
        wait_for(said, "ready", "restart")
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        os.close(terminal)


def test_under_nohup_a_terminal_that_closes_stops_nothing(said: Path) -> None:
    number, terminal = in_a_terminal(said, "env", "--ignore-signal=HUP")
    try:
        os.close(terminal)
        wait_for(said, "ready", "hangup")
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def test_once_the_terminal_is_long_gone_sighup_restarts_again(said: Path) -> None:
    number, terminal = in_a_terminal(said, "env", "--ignore-signal=HUP", closing_s=0.5)
    try:
        os.close(terminal)
        wait_for(said, "ready", "hangup")
        time.sleep(0.6)
        os.kill(number, signal.SIGHUP)
        wait_for(said, "ready", "hangup", "restart")
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


STOPPABLE = """
import os
import sys
from app.launch.signals import Signals
signals = Signals()
open(sys.argv[1], "w").write(f"{os.getpid()}")
while not signals.wait_for_stop(0.05):
    pass
status = 3 if signals.impatient.is_set() else 0
open(sys.argv[1] + ".status", "w").write(f"{status}")
sys.exit(status)
"""
MAKES_OWN_MISTAKE = 2
"""GNU make's handler may reap what its main loop waits for: then it ends so, with "wait: No child processes"."""


@pytest.mark.parametrize(
    ("number", "to", "ends_with"),
    [
        (signal.SIGTERM, "make", -signal.SIGTERM),
        (signal.SIGTERM, "both", -signal.SIGTERM),
        (signal.SIGTERM, "launcher", 0),
        (signal.SIGINT, "make", -signal.SIGINT),  # as a script does that knows of make alone
        (signal.SIGINT, "both", -signal.SIGINT),  # as a terminal does
        (signal.SIGINT, "launcher", 0),
    ],
)
def test_a_stop_ends_make_and_what_it_runs_whoever_is_sent_it(
    tmp_path: Path, number: signal.Signals, to: str, ends_with: int
) -> None:
    program, makefile, noted = (tmp_path / name for name in ("stoppable.py", "Makefile", "number"))
    program.write_text(STOPPABLE)
    makefile.write_text(f"serve:\n\t@exec {sys.executable} {program} {noted}\n")
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    command = ["make", "-f", str(makefile), "serve"]
    with subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment, start_new_session=True) as make:
        until(lambda: noted.exists() and noted.read_text(), "it runs", LIMIT_S)
        launcher = int(noted.read_text())
        if to == "both":
            os.killpg(make.pid, number)
        else:
            os.kill(make.pid if to == "make" else launcher, number)
        assert make.wait(patience(LIMIT_S)) in ({ends_with, MAKES_OWN_MISTAKE} if to == "both" else {ends_with})
        until(lambda: not psutil.pid_exists(launcher), "it has ended", LIMIT_S)
        assert noted.with_name("number.status").read_text() == "0", "one stop is no impatience"


@pytest.mark.parametrize(
    ("make", "number", "times", "impatient"),
    [
        (1, signal.SIGTERM, 2, False),  # make hands on what its group was sent, too
        (1, signal.SIGTERM, 3, True),
        (1, signal.SIGINT, 2, True),  # make hands no Ctrl-C on
        (None, signal.SIGTERM, 2, True),
    ],
)
def test_a_stop_that_make_hands_on_is_the_same_one(
    monkeypatch: pytest.MonkeyPatch, make: int | None, number: signal.Signals, times: int, impatient: bool
) -> None:
    monkeypatch.setattr(module, "_parent_make", lambda: make)
    monkeypatch.setattr(module.signal, "signal", lambda *handled: None)
    signals = module.Signals()
    for _ in range(times - 1):
        signals._on_stop(number, None)
        assert not signals.impatient.is_set()
    signals._on_stop(number, None)
    assert signals.impatient.is_set() == impatient


def ended_with_one_at_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[module.Signals], object]) -> int:
    """The steps of `act`. At each of them it was interrupted once by a SIGTERM, as a handler interrupts, and ended."""
    monkeypatch.setattr(module, "_parent_make", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda *handled: None)
    for step in itertools.count():
        signals, steps = module.Signals(), itertools.count()

        def trace(*seen: Any, signals: module.Signals = signals, steps: Iterator[int] = steps, at: int = step) -> Any:
            if next(steps) == at:
                signals._on_stop(signal.SIGTERM, None)
            return trace

        def traced(signals: module.Signals = signals, trace: Any = trace) -> None:
            sys.settrace(trace)
            act(signals)

        thread = threading.Thread(target=traced, daemon=True)
        thread.start()
        thread.join(patience(LIMIT_S))
        assert not thread.is_alive(), f"it hangs where it is interrupted at step {step}"
        if next(steps) <= step:
            return step
        assert signals.wait_for_stop(0)
    raise AssertionError


@pytest.mark.parametrize(
    "act",
    [lambda signals: signals.wait_for_stop(0.001), lambda signals: signals._on_stop(signal.SIGINT, None)],
    ids=["waiting", "told of another one"],
)
def test_a_stop_may_come_at_any_moment(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[module.Signals], object]
) -> None:
    assert ended_with_one_at_each_step(monkeypatch, act) > 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_the_launchers_imports_is_one_as_asked(tmp_path: Path, number: signal.Signals) -> None:
    reached = tmp_path / "reached"
    slow = f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(600)\n"
    (tmp_path / "typer.py").write_text(slow)  # in the place of the first that it imports
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "app.launch"]
    with subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment, start_new_session=True) as launcher:
        until(reached.exists, "it imports", LIMIT_S)
        launcher.send_signal(number)
        assert launcher.wait(patience(LIMIT_S)) == 0
