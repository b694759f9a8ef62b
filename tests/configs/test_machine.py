"""What is read off the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs import machine


def test_a_containers_limit_counts_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (tmp_path / "absent", limit))
    limit.write_text("max\n")
    assert machine.memory_bytes() == psutil.virtual_memory().total
    limit.write_text("1048576\n")
    assert machine.memory_bytes() == 1048576


def test_settings_load_without_ray_torch_or_vllm() -> None:
    code = "import sys, configs.settings; print([m for m in ('ray', 'torch', 'vllm') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
