"""How many cores Ray is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.launch import cluster
from configs.settings import load_settings


@pytest.mark.parametrize(("cores", "replicas", "told"), [(8, 2, 8), (1, 2, 4), (96, 2, 96)])
def test_a_quota_counts_and_no_less_than_the_parts_ask_for(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, cores: int, replicas: int, told: int
) -> None:
    monkeypatch.setattr(cluster, "cores", lambda: cores)
    settings = load_settings({"model": str(model_folder), "replicas": replicas, "engine": {"threads": 1}})
    assert cluster.ray_options(settings, Path("/folder"))["num_cpus"] == told
