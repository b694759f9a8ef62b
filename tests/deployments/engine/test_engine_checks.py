"""Whatever leads to it: an engine whose configuration does not keep KV exact is not started, and says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import vllm.config.vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext

from configs.settings import load_settings
from deployments.engine.checks import check_engine_config
from deployments.engine.engine_args import engine_args, engine_config, engine_environment
from deployments.engine.host import start_engine


@pytest.fixture
def config(demo_model: Path) -> VllmConfig:
    return engine_config(settings(demo_model))


def settings(model: Path) -> Any:
    return load_settings({"model": str(model), "dtype": "float32", "engine": {"device_blocks": 100}})


def test_the_configuration_that_crosskv_builds_is_taken(config: VllmConfig) -> None:
    check_engine_config(config)


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("parallel_config", "world_size", 2, "all layers of all its requests"),
        ("parallel_config", "data_parallel_size", 2, "all layers of all its requests"),
        ("parallel_config", "worker_cls", "plugin.Worker", "vLLM's own"),
        ("scheduler_config", "async_scheduling", True, "steps overlap"),
        ("scheduler_config", "scheduler_cls", "plugin.Scheduler", "vLLM's own"),
        ("parallel_config", "pipeline_parallel_size", 2, "steps overlap"),
        ("cache_config", "prefix_caching_hash_algo", "sha256", "not by sha256_cbor"),
        ("kv_transfer_config", "kv_connector", "OffloadingConnector", "place of crosskv's connector"),
        ("kv_transfer_config", "kv_load_failure_policy", "fail", "must be recomputed"),
    ],
)
def test_an_engine_that_would_not_keep_kv_exact_is_not_started(
    config: VllmConfig, part: str, name: str, value: Any, reason: str
) -> None:
    setattr(getattr(config, part), name, value)
    with pytest.raises(ValueError, match=reason):
        start_engine(config)


def test_vllm_takes_other_arguments_than_the_settings_let_through(demo_model: Path) -> None:
    """What the checks read is what vLLM makes of its arguments, not what the settings said."""
    args = engine_args(settings(demo_model))
    args.prefix_caching_hash_algo = "sha256"
    args.data_parallel_size = 2
    with pytest.raises(ValueError, match="all layers of all its requests"):
        check_engine_config(args.create_engine_config(UsageContext.ENGINE_CONTEXT))


def test_a_replica_never_runs_the_second_model_runner(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#49250: after a failed synchronous load runner V2 computes from the wrong position, and answers garbage."""
    envs.disable_envs_cache()  # an engine that another test has started turns it on
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # the user's wish, in the environment that replicas inherit
    config = engine_config(settings(demo_model))
    assert config.use_v2_model_runner, "vLLM still asks this variable"
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        start_engine(config)

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    for name, value in engine_environment(settings(demo_model)).items():
        monkeypatch.setenv(name, value)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not config.use_v2_model_runner
    check_engine_config(config)
