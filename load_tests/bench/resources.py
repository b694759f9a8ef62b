"""CPU seconds and memory of a server: of the process that was started and everything below it."""

from __future__ import annotations

import contextlib

import psutil

from load_tests.footprint import pss_by_process


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


def pss_bytes(top: psutil.Process) -> int:
    """Proportional set size of a process tree: pages that several processes share are counted once."""
    return sum(size for _, size in pss_by_process(top))
