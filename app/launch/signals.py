"""What the launcher is asked for: a stop (Ctrl-C, SIGTERM, a closed terminal, an ended `make`) or a restart (SIGHUP).

A terminal that closes sends SIGHUP too. It has just gone then, which tells the two apart; where `nohup` had SIGHUP
ignored, that one stays ignored. A `make` above us asks for a stop when it was itself interrupted or has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import time
from pathlib import Path
from types import FrameType

import psutil

_CLOSING_S = 5.0
"""A SIGHUP within that time of a terminal's end is the terminal's."""


class Flag:
    """A `threading.Event` that a signal's handler may set. An Event takes a lock that whom it interrupts may hold."""

    def __init__(self) -> None:
        self._is_set = False
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is made to be called at any moment

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it, for good."""
        self._is_set = True
        self._told.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Whether it was set, known at latest after `timeout_s`."""
        if not self._is_set and timeout_s > 0:
            with contextlib.suppress(queue.Empty):
                self._told.get(timeout=timeout_s)
        return self._is_set


class Signals:
    """Install from the main thread, which alone may ask. `impatient` is set by a second signal to stop: do not wait.

    Below `make` one more SIGTERM is needed: it may be the first one again.
    """

    def __init__(self) -> None:
        self.impatient = Flag()
        self._stop = Flag()
        self._hung_up = False
        self._make = _parent_make()
        # A SIGTERM to make and all that it runs comes twice: make hands its own on, as late as the machine is busy.
        self._may_be_handed_on = self._make is not None
        self._has_terminal = _has_terminal()
        self._terminal_gone_at = -math.inf
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, self._on_hangup)

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Whether to stop, known at latest after `timeout_s`."""
        return self._stop.wait(timeout_s) or self._make_stopped()

    def take_restart(self) -> bool:
        """Whether a restart was asked for since the last call. Call often: a closed terminal is noticed here."""
        now = time.monotonic()
        hung_up, self._hung_up = self._hung_up, False
        if self._has_terminal and not _has_terminal():
            self._has_terminal, self._terminal_gone_at = False, now
        if hung_up and now - self._terminal_gone_at < _CLOSING_S:
            if not self._outlives_terminal:
                self._stop.set()
            return False
        return hung_up

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stop.is_set():
            self._stop.set()
        elif number == signal.SIGTERM and self._may_be_handed_on:
            self._may_be_handed_on = False
        else:
            self.impatient.set()

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True

    def _make_stopped(self) -> bool:
        """Whether make has ended, or was interrupted alone: no other process hears that, but make's handler is gone."""
        return self._make is not None and (os.getppid() != self._make or not _catches_interrupt(self._make))


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal that has not hung up."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _parent_make() -> int | None:
    try:
        parent = psutil.Process(os.getppid())
        is_make = parent.name() in ("make", "gmake") and _catches_interrupt(parent.pid)
    except psutil.Error:
        return None
    return parent.pid if is_make else None


def _catches_interrupt(pid: int) -> bool:
    """Whether the process still has its handler for SIGINT; GNU make drops it on the first one (Linux only)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)
