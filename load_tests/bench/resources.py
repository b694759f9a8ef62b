"""CPU seconds and memory of a server: of the process that was started and everything below it."""

from __future__ import annotations

import contextlib
import time

import psutil

from load_tests.harness.footprint import pss_by_process

QUIET_CORES = 0.9
"""An idle crosskv takes half a core of a slow machine; a part that is starting, or a copy, takes a whole one more."""
QUIET_LIMIT_S = 60.0
_QUIET_LOOK_S = 2.0


class CPUMeter:
    """CPU seconds (user and system) of a process tree since the meter was made.

    A process that ended between two readings counts as it was at the last reading.
    """

    def __init__(self, top: psutil.Process) -> None:
        self._top = top
        self._last: dict[tuple[int, float], float] = {}
        self._began = self._read()

    def seconds(self) -> float:
        """Since the meter was made."""
        return self._read() - self._began

    def _read(self) -> float:
        for process in [self._top, *self._top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._last[process.pid, process.create_time()] = times.user + times.system
        return sum(self._last.values())


def wait_until_quiet(top: psutil.Process) -> bool:
    """Until the process tree takes less than `QUIET_CORES` of a core, for at most `QUIET_LIMIT_S`; whether it does.

    crosskv answers before its prefetch workers are there, and copies to lower tiers after the last answer.
    """
    deadline = time.monotonic() + QUIET_LIMIT_S
    while time.monotonic() < deadline:
        meter = CPUMeter(top)
        time.sleep(_QUIET_LOOK_S)
        if meter.seconds() < QUIET_CORES * _QUIET_LOOK_S:
            return True
    return False


def pss_bytes(top: psutil.Process) -> int:
    """Proportional set size of a process tree: pages that several processes share are counted once."""
    return sum(size for _, size in pss_by_process(top))
