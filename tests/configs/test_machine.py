"""What is read off the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs import machine

pytestmark = pytest.mark.usefixtures("own_machine")


def test_a_containers_limit_counts_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (tmp_path / "absent", limit))
    limit.write_text("max\n")
    assert machine.memory_bytes() == psutil.virtual_memory().total
    limit.write_text("1048576\n")
    assert machine.memory_bytes() == 1048576


@pytest.mark.parametrize(
    ("cpu_info", "dtype"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n", "bfloat16"),
        ("flags : fpu amx_tile amx_bf16\n", "bfloat16"),
        ("flags : fpu avx2 avx512f avx512_vnni\n", "float32"),
        ("Features : fp asimd bf16\n", "bfloat16"),
        ("", "float32"),
        (None, "float32"),
    ],
    ids=["AVX-512 BF16", "AMX", "AVX-512 without", "ARM", "it says nothing", "no such file"],
)
def test_bfloat16_is_chosen_where_the_processor_has_instructions_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_info: str | None, dtype: str
) -> None:
    path = tmp_path / "cpuinfo"
    if cpu_info is not None:
        path.write_text(cpu_info)
    monkeypatch.setattr(machine, "_CPU_INFO", path)
    assert machine.cpu_dtype() == dtype


def test_settings_load_without_ray_torch_or_vllm() -> None:
    code = "import sys, configs.settings; print([m for m in ('ray', 'torch', 'vllm') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


X86 = {
    "AVX512": "avx avx2 fma avx512f avx512vl avx512bw avx512dq",
    "AVX2": "avx avx2 fma avx512f",
    "DEFAULT": "fpu sse4_2",
}


@pytest.mark.parametrize(
    ("arch", "flags", "dtype", "kind"),
    [
        ("x86_64", X86["AVX512"], "bfloat16", "vec, AVX512"),
        ("x86_64", X86["AVX2"], "bfloat16", "vec, AVX2"),
        ("x86_64", X86["DEFAULT"], "float32", "vec, DEFAULT"),
        ("x86_64", f"{X86['AVX512']} amx_tile", "bfloat16", "amx, AVX512"),
        ("x86_64", f"{X86['AVX512']} amx_tile", "auto", "amx, AVX512"),
        ("x86_64", f"{X86['AVX512']} amx_tile", "float32", "vec, AVX512"),
        ("aarch64", "fp asimd", "float32", "neon, DEFAULT"),
        ("aarch64", "fp asimd sve", "float32", "neon, SVE"),
        ("riscv64", "", "float32", "vec, DEFAULT"),
    ],
)
def test_a_kind_of_processor_is_the_instructions_that_kv_is_computed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, flags: str, dtype: str, kind: str
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"{'flags' if arch == 'x86_64' else 'Features'}\t: {flags}\n")
    monkeypatch.setattr(machine, "_CPU_INFO", file)
    monkeypatch.setattr(machine.platform, "machine", lambda: arch)
    assert machine.processor_kind(dtype) == kind
