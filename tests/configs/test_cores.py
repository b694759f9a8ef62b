"""What counts as this machine's cores, in trees of control groups as systems have them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from configs.machine import cores as counted
from configs.machine.cores import cores
from configs.model_folder import PROJECT_ROOT

ALLOWED = 96


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, on a machine with `ALLOWED` cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(ALLOWED)), raising=False)
    monkeypatch.setattr(counted, "_MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(counted, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path


def build(tree: Path, own: str | None, files: dict[str, str]) -> None:
    if own is not None:
        (tree / "own").write_text(own, encoding="utf-8")
    for name, text in files.items():
        path = tree / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


V1 = "12:cpu,cpuacct:/docker/1a2b\n3:memory:/docker/1a2b\n1:name=systemd:/docker/1a2b\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        (None, {}, ALLOWED),
        ("0::/\n", {"cpu.max": "max 100000\n"}, ALLOWED),
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "99900000 100000\n"}, ALLOWED),
        ("0::/system.slice/a.service\n", {"system.slice/a.service/cpu.max": "400000 100000\n"}, 4),
        (
            "0::/system.slice/a.service\n",
            {"system.slice/cpu.max": "200000 50000\n", "system.slice/a.service/cpu.max": "max 100000\n"},
            4,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, ALLOWED),
        (
            V1,
            {
                "cpu,cpuacct/docker/1a2b/cpu.cfs_quota_us": "500000\n",
                "cpu,cpuacct/docker/1a2b/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        ("0::/\n", {"cpu.max": "what\n"}, ALLOWED),
        ("0::/\n", {"cpu.max": "100000 0\n"}, ALLOWED),
    ],
)
def test_a_quota_counts_where_it_is_less(tree: Path, own: str | None, files: dict[str, str], found: int) -> None:
    build(tree, own, files)
    assert cores() == found


def test_nothing_counts_cores_another_way() -> None:
    folders = ("app", "configs", "deployments", "kernels", "kvmanager", "models")
    files = (path for folder in folders for path in (PROJECT_ROOT / folder).rglob("*.py"))
    counting = {path for path in files if re.search(r"cpu_count|sched_getaffinity", path.read_text(encoding="utf-8"))}
    assert counting == {Path(counted.__file__)}


def test_the_cores_that_it_may_run_on_count_where_they_are_fewer(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tree, "0::/\n", {"cpu.max": "800000 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5}, raising=False)
    assert cores() == 2
