"""A model that cannot be blended is found out at the start, in words, and nothing of the pool is disturbed by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_engine import LiveEngine

from deployments.engine.load_paths.blending import path as path_module
from deployments.engine.load_paths.blending import refusals
from deployments.engine.load_paths.blending.model import BlendModel
from deployments.engine.load_paths.blending.self_test import SelfTestError, self_test
from kernels.blend.rows import Runs
from kvmanager.extensions.blend.chunks import BlendTerms


def try_it(engine: LiveEngine) -> float:
    worker = engine.thread.core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    pool, copier = engine.scheduler.kv_cache_manager.block_pool, engine.reuse.copier
    return engine.on_engine_thread(lambda: self_test(BlendModel(runner), pool, copier, 1024))


def test_the_engine_has_passed_it_and_says_how_it_blends(engine: LiveEngine) -> None:
    assert engine.reuse.paths["blend"].terms == BlendTerms(check_layer=2, layers=6)
    assert engine.reuse.paths["blend"].counters.available
    assert try_it(engine) < 1e-4


def test_it_takes_free_blocks_and_gives_them_back_unnoticed(engine: LiveEngine) -> None:
    device = set(engine.port.on_device)
    try_it(engine)
    assert engine.blocks_in_use() == 0
    assert engine.port.on_device == device
    assert engine.on_engine_thread(engine.reuse.control.cached_hashes) == []


def keys_turn_otherwise(patch: pytest.MonkeyPatch) -> None:
    shifted = BlendModel.shifted
    patch.setattr(BlendModel, "shifted", lambda self, layer, keys, by: shifted(self, layer, keys, by + 1))


def embeddings_are_scaled_elsewhere(patch: pytest.MonkeyPatch) -> None:
    embed = BlendModel.embed
    patch.setattr(BlendModel, "embed", lambda self, tokens: 1.2 * embed(self, tokens))


def runs_are_not_masked(patch: pytest.MonkeyPatch) -> None:
    def one_run(positions: torch.Tensor) -> Runs:
        length, rows = int(positions[-1]) + 1, len(positions)
        starts = torch.tensor([0, rows], dtype=torch.int32)
        return Runs(starts, torch.tensor([length], dtype=torch.int32), rows, length)

    patch.setattr("deployments.engine.load_paths.blending.model.runs_of", one_run)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (keys_turn_otherwise, "moved"),
        (embeddings_are_scaled_elsewhere, "layer by layer"),
        (runs_are_not_masked, "rows with gaps"),
    ],
)
def test_a_model_that_computes_otherwise_fails_it(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, broken: Any, what: str
) -> None:
    broken(monkeypatch)
    with pytest.raises(SelfTestError, match=what):
        try_it(engine)


def test_what_fails_or_raises_turns_blending_off_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    nothing: Any = None
    monkeypatch.setattr(path_module, "why_not", lambda *_: None)
    monkeypatch.setattr(path_module, "BlendModel", lambda runner: None)

    def raising(*_: Any) -> float:
        raise RuntimeError("its layers take other arguments")

    monkeypatch.setattr(path_module, "self_test", raising)
    assert path_module.model_to_blend(config, nothing, nothing, nothing) is None
    assert "blending is off" in caplog.text
    assert "other arguments" in caplog.text


def config_with(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "lora_config": None,
        "speculative_config": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "use_mla": False,
        "sliding_window": None,
        "is_multimodal_model": False,
        "cache_dtype": "auto",
    } | changes
    return SimpleNamespace(
        lora_config=parts["lora_config"],
        speculative_config=parts["speculative_config"],
        parallel_config=SimpleNamespace(
            tensor_parallel_size=parts["tensor_parallel_size"], pipeline_parallel_size=parts["pipeline_parallel_size"]
        ),
        model_config=SimpleNamespace(
            use_mla=parts["use_mla"],
            get_sliding_window=lambda: parts["sliding_window"],
            is_multimodal_model=parts["is_multimodal_model"],
        ),
        cache_config=SimpleNamespace(cache_dtype=parts["cache_dtype"]),
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lora_config": object()}, "LoRA"),
        ({"tensor_parallel_size": 2}, "several processes"),
        ({"pipeline_parallel_size": 2}, "several processes"),
        ({"speculative_config": object()}, "speculative"),
        ({"use_mla": True}, "MLA"),
        ({"sliding_window": 512}, "sliding window"),
        ({"is_multimodal_model": True}, "more than text"),
        ({"cache_dtype": "fp8"}, "fp8"),
    ],
)
def test_a_configuration_that_is_not_blended_is_refused_in_words(change: dict[str, Any], why: str) -> None:
    found = refusals.why_not(config_with(**change), None)
    assert found is not None
    assert why in found


def test_a_model_without_layers_that_could_be_called_is_refused() -> None:
    group = SimpleNamespace(kernel_block_size=None)
    runner = SimpleNamespace(get_model=lambda: SimpleNamespace(), attn_groups=[[group]])
    found = refusals.why_not(config_with(), runner)
    assert found is not None
    assert "model.layers" in found


def test_keys_whose_angles_depend_on_more_than_the_position_cannot_be_moved() -> None:
    from vllm.model_executor.layers.rotary_embedding import DynamicNTKScalingRotaryEmbedding, MRotaryEmbedding

    for kind in (DynamicNTKScalingRotaryEmbedding, MRotaryEmbedding):
        assert refusals.inv_freq_of(object.__new__(kind)) is None


def test_a_groups_metadata_is_its_own_and_no_buffer_of_the_builder() -> None:
    """Built fast, FlashAttention's has no schedule, which the next group or step would overwrite."""
    model: Any = object.__new__(BlendModel)
    model.block_size = 4
    model._builder = SimpleNamespace(build=lambda prefix, common, fast_build=False: fast_build)
    assert model.group(torch.arange(3), torch.tensor([5])).metadata is True
