"""Processor time that this process may use, in cores: a container's or service's quota, not the whole machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the cores that this process may run on, or those that its quota pays for where these are fewer.

    The quota is Linux' control groups', of either version, and of each group above the process's own. A part of a core
    counts as one.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """In cores, of all groups that have one."""
    for folder in _groups():
        try:
            if (folder / "cpu.max").is_file():  # version 2
                quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            else:
                quota, period = (
                    (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8").strip() for name in ("quota", "period")
                )
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # not there, or of no form that is known


def _groups() -> Iterator[Path]:
    """The folders of this process's groups, and of those above them.

    In a container the path may be the host's, of which nothing is there: the mounted folder is the process's own then.
    """
    yield from (_MOUNTED, _MOUNTED / "cpu", _MOUNTED / "cpu,cpuacct")
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = _MOUNTED / controllers
        for name in Path(path).parts[1:]:
            folder = folder / name
            yield folder
