"""Where sparse prefixes cannot be presented exactly, it is said in words, before a request comes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, VllmConfig

from configs.settings import load_settings
from deployments.engine.engine_args import engine_config
from deployments.engine.load_paths.sparse.refusals import why_not, why_not_built


@pytest.fixture(scope="module")
def built(demo_model: Path) -> VllmConfig:
    return engine_config(
        load_settings({"model": str(demo_model), "dtype": "float32", "engine": {"device_blocks": 100}})
    )


def test_the_engine_that_crosskv_builds_presents_them(built: VllmConfig) -> None:
    assert why_not(built) is None


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("compilation_config.cudagraph_mode", CUDAGraphMode.FULL, "full CUDA graph"),
        ("compilation_config.cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE, "full CUDA graph"),
        ("speculative_config", object(), "draft model"),
        ("parallel_config.world_size", 2, "each rank"),
        ("parallel_config.decode_context_parallel_size", 2, "each rank"),
        ("parallel_config.enable_dbo", True, "micro-batches"),
        ("model_config.hf_text_config.sliding_window", 64, "windows"),
        ("cache_config.enable_prefix_caching", False, "prefix cache"),
        ("cache_config.cache_dtype", "fp8", "kept as fp8"),
    ],
)
def test_what_an_engine_may_not_do_beside(
    built: VllmConfig, monkeypatch: pytest.MonkeyPatch, path: str, value: Any, reason: str
) -> None:
    *owners, name = path.split(".")
    part: Any = built
    for owner in owners:
        part = getattr(part, owner)
    monkeypatch.setattr(part, name, value, raising=False)
    assert reason in (why_not(built) or "")


def test_graphs_in_pieces_are_no_obstacle(built: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built.compilation_config, "cudagraph_mode", CUDAGraphMode.PIECEWISE)
    assert why_not(built) is None


def test_nor_do_the_second_model_runner_and_latent_attention(
    built: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(built), "use_v2_model_runner", property(lambda self: True))
    assert "V2" in (why_not(built) or "")
    monkeypatch.undo()
    monkeypatch.setattr(type(built.model_config), "use_mla", property(lambda self: True))
    assert "MLA" in (why_not(built) or "")


def runner(groups: int = 1, backend: str = "CPU_ATTN", kernel_block: int = 32, **layer: Any) -> Any:
    attention = SimpleNamespace(
        kv_sharing_target_layer_name=layer.pop("shares", None), impl=SimpleNamespace(sliding_window=-1, **layer)
    )
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: backend), layer_names=["layer"])
    return SimpleNamespace(
        attn_groups=[[group] * groups],
        compilation_config=SimpleNamespace(static_forward_context={"layer": attention}),
        input_batch=SimpleNamespace(block_table=[SimpleNamespace(block_size=kernel_block)]),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=32)),
    )


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (runner(groups=2), "2 kinds"),
        (runner(backend="FLASHINFER"), "FLASHINFER"),
        (runner(alibi_slopes=[0.5]), "ALiBi"),
        (runner(shares="other"), "share KV"),
        (runner(kernel_block=16), "smaller"),
    ],
)
def test_what_a_built_engine_may_not_be(made: Any, reason: str) -> None:
    assert why_not_built(runner()) is None
    assert reason in (why_not_built(made) or "")
