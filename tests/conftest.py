"""What every test may rely on: a Ray without token auth, no hub, and a folder that passes for a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports ray, vllm or transformers.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes for a model of 4,096 tokens while settings are checked; it holds no weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    return folder


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray of this test session's own: no dashboard, no spilling, logical CPUs enough for many small actors."""
    import ray

    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        num_cpus=8,
        object_store_memory=256 * 1024**2,
        log_to_driver=False,
        _system_config={"automatic_object_spilling_enabled": False},
    )
    yield ray
    ray.shutdown()
