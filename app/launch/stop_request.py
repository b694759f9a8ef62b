"""When to stop: Ctrl-C, SIGTERM, a closed terminal, or a `make` above us that was itself interrupted or has ended."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

import psutil


class StopRequest:
    """Install from the main thread. `impatient` is set by a second signal: stop without waiting for a graceful end."""

    def __init__(self) -> None:
        self.impatient = threading.Event()
        self._requested = threading.Event()
        self._make = _parent_make()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Whether to stop, known at latest after `timeout_s`."""
        return self._requested.wait(timeout_s) or self._make_stopped()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        (self.impatient if self._requested.is_set() else self._requested).set()

    def _make_stopped(self) -> bool:
        """An interrupt sent to make alone reaches nobody else, and make then waits for us: its handlers show it."""
        return self._make is not None and (os.getppid() != self._make or not _catches_interrupt(self._make))


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
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)
