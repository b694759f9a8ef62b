"""Models whose KV crosskv does not move keep vLLM's own prefix cache, and say in words why KV is not shared."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import CACHES_LATENTS, keep_latents
from transformers import DeepseekV2Config, Gemma3ForCausalLM, Gemma3TextConfig, JambaConfig, LlamaConfig, MistralConfig
from vllm.model_executor.models import registry
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from configs.settings import PROJECT_ROOT, Settings, load_settings
from deployments.engine import handle, wiring
from deployments.engine.engine_args import block_bytes, engine_config
from deployments.engine.groups import ONE_DENSE, STATE, KVGroups, read_groups
from deployments.engine.handle import EngineHandle, EnginePrompt
from deployments.engine.model_identity import why_not_shared
from deployments.protocol.wire import GenerateRequest
from load_tests.harness.engine import greedy, prompt

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
LATENTS: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
TINY: dict[str, Any] = {
    "vocab_size": 1148, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 64, "head_dim": 32}
CHUNKS = {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "head_dim": 32}
HYBRID = Gemma3TextConfig(**TINY, **WINDOWS, query_pre_attn_scalar=32)
LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
DEEPSEEK = DeepseekV2Config(**{**TINY, "num_key_value_heads": 4}, **LATENT, n_routed_experts=2, n_group=1)
MAMBA = {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}


class LaterAttentionSpec(FullAttentionSpec):
    """What a later vLLM may derive from full attention; nobody has tested it."""


def cache(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{n}.self_attn"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=512)
FULL = FullAttentionSpec(**SHAPE)


@pytest.mark.parametrize(
    ("specs", "windows", "main"),
    [((FULL,), (None,), 0), ((WINDOW,), (512,), 0), ((WINDOW, FULL, WINDOW), (512, None, 512), 1)],
    ids=["full attention", "windows", "both"],
)
def test_full_attention_and_windows_are_understood(
    specs: tuple[KVCacheSpec, ...], windows: tuple[int | None, ...], main: int
) -> None:
    groups = read_groups(cache(*specs))
    assert isinstance(groups, KVGroups)
    assert (groups.windows, groups.main, groups.is_plain) == (windows, main, windows == (None,))
    names = [f"model.layers.{n}.self_attn" for n in range(len(specs))]
    assert groups.runs(names) == [(range(n, n + 1), n) for n in range(len(specs))]


MLA = MLAAttentionSpec(**LATENTS)


def test_latents_alone_are_understood_and_are_one_block_table() -> None:
    groups = read_groups(cache(MLA))
    assert isinstance(groups, KVGroups)
    assert (groups.windows, groups.latents, groups.is_plain, groups.has_layers_alone) == ((None,), True, True, False)
    assert not read_groups(cache(FULL)).latents
    assert read_groups(cache(FULL)).has_layers_alone


STATE_SPEC = MambaSpec(
    block_size=32, shapes=((3, 8), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=1 << 14,
    mamba_type=MambaAttentionBackendEnum.GDN_ATTN, mamba_cache_mode="align",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["GDN_ATTN", "MAMBA2", "SHORT_CONV"])
def test_states_are_understood_with_one_group_of_full_attention(kind: str) -> None:
    spec = replace(STATE_SPEC, mamba_type=MambaAttentionBackendEnum[kind])
    groups = read_groups(cache(spec, FULL, spec))
    assert isinstance(groups, KVGroups)
    assert (groups.windows, groups.states, groups.main, groups.is_plain) == ((STATE, None, STATE), (0, 2), 1, False)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (MLA, "the model keeps latents (MLA), and no test has moved these together with another group's KV"),
        (STATE_SPEC, "the model keeps latents (MLA), and no test has moved these together with another group's KV"),
        (FULL, "the 2 groups of the model's KV cache differ in their blocks, heads or element types"),
        (WINDOW, "the 2 groups of the model's KV cache differ in their blocks, heads or element types"),
    ],
    ids=["latents", "states", "full attention", "windows"],
)
def test_latents_with_another_group_are_refused(other: KVCacheSpec, why: str) -> None:
    assert read_groups(cache(MLA, other)) == why


@pytest.mark.parametrize("others", [(), (WINDOW,), (FULL, FULL), (FULL, WINDOW)], ids=lambda others: str(len(others)))
def test_states_with_anything_else_are_refused(others: tuple[KVCacheSpec, ...]) -> None:
    why = "the model has states, and other layers than those of one group of full attention"
    assert read_groups(cache(STATE_SPEC, *others)) == why


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"mamba_cache_mode": "none"}, "not at the ends of blocks"),
        ({"num_speculative_blocks": 2}, "leave speculative_config out"),
        ({"num_prefill_checkpoint_blocks": 1}, "at places inside a step"),
        ({"mamba_type": MambaAttentionBackendEnum.MAMBA1}, "no test has moved states of the kind MAMBA1"),
        ({"block_size": 64}, "differ in their blocks"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_states_of_another_kind_are_refused_in_words(other: dict[str, Any], why: str) -> None:
    assert why in str(read_groups(cache(FULL, replace(STATE_SPEC, **other))))


def test_layers_of_one_group_that_follow_each_other_are_copied_together() -> None:
    groups = KVGroups((512, None), {"a": 0, "b": 0, "c": 1, "d": 0})
    assert groups.runs(["a", "b", "c", "d"]) == [(range(2), 0), (range(2, 3), 1), (range(3, 4), 0)]


MAMBA_STATE = {
    "block_size": 32, "shapes": ((4, 8),), "dtypes": (torch.float32,), "mamba_type": MambaAttentionBackendEnum.MAMBA1,
}  # fmt: skip
REFUSED: dict[str, tuple[KVCacheSpec, str]] = {
    "a window as full": (FullAttentionSpec(**SHAPE, sliding_window=512), "a window that vLLM keeps as full attention"),
    "chunks as full": (FullAttentionSpec(**SHAPE, attention_chunk_size=512), "its own chunk, which vLLM keeps as full"),
    "prefix LM": (FullAttentionSpec(**SHAPE, non_causal=True), "its tokens attend to later ones"),
    "unequal K and V": (FullAttentionSpec(**SHAPE, head_size_v=32), "keys and values differ in size"),
    "several tokens as one": (FullAttentionSpec(**SHAPE, tokens_per_state=4), "keeps several tokens as one"),
    "unequal in a window": (SlidingWindowSpec(**SHAPE, sliding_window=512, head_size_v=32), "differ in size"),
    "a window for drafts": (SlidingWindowSpec(**SHAPE, sliding_window=512, extra_retained_tokens=8), "for drafts"),
    "a padded window": (SlidingWindowSpec(**SHAPE, sliding_window=512, page_size_padded=1 << 20), "are padded"),
    "chunked": (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=512), "attends to its own chunk only"),
    "sinks": (interface.SinkFullAttentionSpec(**SHAPE, sink_len=4), "sinks in blocks of their own"),
    "MLA with an index": (
        MLAAttentionSpec(**LATENTS, is_index_group_leader=True),
        "an index chooses which of its latents (MLA)",
    ),
    "the index of MLA": (
        MLAAttentionSpec(**LATENTS, cache_role=interface.SparseCacheRole.INDEXER),
        "an index chooses which of its",
    ),
    "DeepSeek V4": (MLAAttentionSpec(**LATENTS, model_version="deepseek_v4"), "in the form of deepseek_v4"),
    "packed latents": (
        MLAAttentionSpec(**LATENTS, state_content_bytes=656, cache_dtype_str="fp8_ds_mla"),
        "scales, as fp8_ds_mla",
    ),
    "padded latents": (MLAAttentionSpec(**LATENTS, page_size_padded=1 << 20), "latents' (MLA) blocks are padded"),
    "several tokens as one latent": (MLAAttentionSpec(**LATENTS, tokens_per_state=4), "several tokens as one latent"),
    "latents of a window": (MLAAttentionSpec(**LATENTS, sliding_window=512), "its latents (MLA) are a window's"),
    "later latents": (MLAAttentionSpec(**LATENTS, non_causal=True), "its tokens attend to later ones"),
    "latents of heads": (MLAAttentionSpec(**{**LATENTS, "num_kv_heads": 2}), "have several heads, or values"),
    "MLA with windows": (interface.SlidingWindowMLASpec(**SHAPE, sliding_window=512), "latents (MLA) of a window"),
    "R-SWA": (interface.RSWASpec(**SHAPE, rswa_window=512), "depends on where a prompt ends"),
    "hidden states": (interface.HiddenStateCacheSpec(**SHAPE), "hidden states, for a draft"),
    "a ring": (interface.CircularBufferSpec(**SHAPE), "a ring of the last tokens"),
    "cross attention": (interface.CrossAttentionSpec(**SHAPE), "what an encoder has made"),
    "encoder": (interface.EncoderOnlyAttentionSpec(**SHAPE), "is an encoder's"),
    "hot pages": (interface.HiSparseHotSpec(block_size=32, page_size=64, blocks_per_request=2), "in host memory"),
    "resident pages": (interface.HiSparseResidentSpec(block_size=32, page_size=64), "in host memory"),
    "state": (interface.MambaSpec(**MAMBA_STATE), "a state instead of KV"),
    "unknown": (LaterAttentionSpec(**SHAPE), "no test has moved KV of this kind"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_any_other_attention_is_refused_by_its_group_and_says_what_it_is(kind: str) -> None:
    spec, why = REFUSED[kind]
    for number, config in enumerate((cache(spec), cache(FULL, spec))):
        said = str(read_groups(config))
        assert said.startswith(f"group {number} of the model's KV cache is {type(spec).__name__}: ")
        assert why in said


def test_every_kind_of_cache_that_vllm_has_is_understood_or_in_the_table() -> None:
    """A new one in a later vLLM wants a decision, and words."""
    bases = (KVCacheSpec, interface.AttentionSpec, interface.UniformTypeKVCacheSpecs)
    kinds = {each for each in vars(interface).values() if isinstance(each, type) and issubclass(each, KVCacheSpec)}
    assert kinds - {*bases, FullAttentionSpec, SlidingWindowSpec} <= {type(spec) for spec, _ in REFUSED.values()}


@pytest.mark.parametrize("other", [{"head_size": 128}, {"num_kv_heads": 4}, {"block_size": 64}], ids=str)
def test_groups_of_unequal_shape_are_refused(other: dict[str, Any]) -> None:
    config = cache(FULL, SlidingWindowSpec(**{**SHAPE, **other}, sliding_window=512))
    assert "differ in their blocks, heads or element types" in str(read_groups(config))


def test_blocks_that_are_named_or_found_by_other_lengths_are_refused() -> None:
    config = cache(FULL, WINDOW)
    config.hash_block_size, config.cache_hit_alignment_tokens = 32, 64
    assert "by other lengths than their own" in str(read_groups(config))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("is_eagle_group", True, "is a draft's"),
        ("host_resident", True, "lies in host memory"),
        ("enable_kv_transfer", False, "is a copy that vLLM makes"),
    ],
)
def test_a_group_that_is_not_the_models_own_or_not_on_the_device_is_refused(name: str, value: bool, why: str) -> None:
    config = cache(FULL, WINDOW)
    setattr(config.kv_cache_groups[1], name, value)
    assert f"group 1 of the model's KV cache {why}" in str(read_groups(config))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A model's folder, without weights unless `weights` are given."""
    # vLLM starts a process for each class that it has never seen, which imports all of vLLM again.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())

    def make(config: Any, weights: Any = None) -> Path:
        (weights or config).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        family = type(config).__name__.removesuffix("Config").removesuffix("Text")
        written.setdefault("architectures", [f"{family}ForCausalLM"])
        (tmp_path / "config.json").write_text(json.dumps(written))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PROJECT_ROOT / "models" / "demo" / name, tmp_path / name)
        return tmp_path

    return make


def settings(model: Path, **engine: Any) -> Settings:
    engine = {"device_blocks": 100, "max_num_batched_tokens": 512, **engine}
    return load_settings({"model": str(model), "dtype": "bfloat16", "engine": engine})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Gemma3TextConfig(**TINY, **CHUNKS, query_pre_attn_scalar=32), r"in every layer \(chunked_attention\)"),
        (JambaConfig(**TINY, **MAMBA, use_mamba_kernels=False), "a state instead of KV"),
        pytest.param(
            DEEPSEEK,
            r"keeps latents \(MLA\), and vLLM has no prefix cache of these on this platform",
            marks=pytest.mark.skipif(CACHES_LATENTS, reason="vLLM has a prefix cache of latents here"),
        ),
    ],
    ids=["chunks", "state space", "MLA"],
)
def test_a_model_of_another_kind_keeps_vllms_own_prefix_cache(
    folder: Callable[..., Path], model: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="deployments.engine.engine_args"):
        config = engine_config(settings(folder(model)))

    assert config.kv_transfer_config is None
    keeps = "MLA" not in reason
    assert config.cache_config.enable_prefix_caching is keeps
    (said,) = (record.getMessage() for record in caplog.records if record.name == "deployments.engine.engine_args")
    kept = "its own prefix cache only" if keeps else "none, as vLLM has it here"
    assert said.startswith(f"KV is not shared, each replica keeps {kept}: ")
    assert why_not_shared(config) in said, "the ingress, and so /health, finds the same in the same configuration"
    assert re.search(reason, said)


def test_a_plain_model_is_shared_and_one_with_quantized_kv_is_not(folder: Callable[..., Path]) -> None:
    model = folder(LlamaConfig(**TINY))
    config = engine_config(settings(model))
    assert why_not_shared(config) is None
    assert config.kv_transfer_config is not None
    config.cache_config.cache_dtype = "fp8"  # one scale for a layer: of the checkpoint, or 1
    assert why_not_shared(config) is None
    config.cache_config.cache_dtype = "int8_per_token_head"
    assert "kept as int8_per_token_head" in (why_not_shared(config) or "")


@pytest.mark.parametrize(
    "windows", [HYBRID, MistralConfig(**TINY, sliding_window=64, head_dim=32)], ids=["both", "all"]
)
def test_a_model_with_windows_is_shared_and_its_pool_has_the_bytes_of_the_setting(
    folder: Callable[..., Path], windows: Any
) -> None:
    config = engine_config(settings(folder(windows)))
    assert why_not_shared(config) is None
    assert config.kv_transfer_config is not None
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    assert config.cache_config.num_gpu_blocks_override is None, "a block of it holds another number of layers"
    assert config.cache_config.kv_cache_memory_bytes == 100 * 2 * 2 * 32 * 32 * 4 * 2
    config.cache_config.cache_dtype = "fp8"
    assert "no test has moved these as fp8" in (why_not_shared(config) or "")


def test_latents_are_shared_where_vllm_has_a_prefix_cache_of_them_and_otherwise_refused_in_words(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = keep_latents(monkeypatch)
    config = engine_config(settings(folder(DEEPSEEK), block_size_tokens=block))
    assert why_not_shared(config) is None
    assert config.kv_transfer_config is not None
    assert block_bytes(config) == 4 * block * 576 * 2, "one vector a token, and no value"
    config.cache_config.cache_dtype = "fp8"
    assert "no test has moved these as fp8" in (why_not_shared(config) or "")
    config.cache_config.cache_dtype = "auto"
    config.parallel_config.tensor_parallel_size = 2
    assert "keeps latents (MLA), of which each rank has all" in (why_not_shared(config) or "")
    config.parallel_config.tensor_parallel_size = 1
    config.model_config.hf_text_config.layer_types = ["sliding_attention"]
    assert "latents (MLA) and windows" in (why_not_shared(config) or "")


def test_a_cache_of_another_shape_than_its_layout_is_not_moved(folder: Callable[..., Path]) -> None:
    """As where the kernel's blocks are smaller than vLLM's."""
    config = engine_config(settings(folder(LlamaConfig(**TINY))))
    heads, dim = TINY["num_key_value_heads"], TINY["hidden_size"] // TINY["num_attention_heads"]
    assert wiring._layout(config, torch.zeros(8, heads, 32, 2 * dim, dtype=torch.bfloat16)).block_size == 32
    with pytest.raises(ValueError, match=r"has blocks of \(2, 16, 64\), and not of \(2, 32, 64\) elements"):
        wiring._layout(config, torch.zeros(16, heads, 16, 2 * dim, dtype=torch.bfloat16))


def test_without_sharing_an_engine_recomputes_everything(folder: Callable[..., Path]) -> None:
    model = folder(LlamaConfig(**TINY))
    config = engine_config(load_settings({"model": str(model), "dtype": "bfloat16", "kv": {"enabled": False}}))
    assert config.kv_transfer_config is None
    assert not config.cache_config.enable_prefix_caching


def open_handle(model: Path) -> EngineHandle:
    def no_port() -> Any:
        raise AssertionError("an engine that shares no KV has no port")

    return EngineHandle(settings(model), "replica", 0, "node", no_port, lambda why: None)


def test_a_hybrid_model_answers_from_vllms_own_prefix_cache(
    folder: Callable[..., Path], own_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kind that is not shared: here one whose windows are not known."""
    monkeypatch.setattr(handle, "why_not_moved", lambda *_: "its windows are not known")
    model = folder(HYBRID, Gemma3ForCausalLM(HYBRID).to(torch.bfloat16))
    opened = own_engine.start(lambda: open_handle(model), lambda opened: opened.close())

    async def twice() -> list[Any]:
        found = []
        for name in ("first", "second"):
            request = GenerateRequest(name, prompt(1, 300), greedy(4), cache_salt="salt", block_hashes=[])
            found.append([output async for output in opened.generate(EnginePrompt(request, None, 0.0))][-1])
        return found

    computed, cached = asyncio.run(twice())

    assert not opened.shares_kv
    assert opened.apart == "its windows are not known", "so that /health says it"
    assert list(cached.outputs[0].token_ids) == list(computed.outputs[0].token_ids)
    assert (computed.num_cached_tokens, cached.num_cached_tokens) == (0, 288)
    shown = {family.name: family.samples[0].value for family in asyncio.run(opened.metrics()) if family.samples}
    assert shown["crosskv_shares_kv"] == 0.0


@pytest.mark.parametrize("seen", ["by the connector", "by its layout"])
def test_what_is_seen_only_when_the_model_is_loaded_is_no_reason_not_to_serve(
    monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    unsupported = "nobody knows it" if seen == "by the connector" else None
    connector = SimpleNamespace(unsupported=unsupported, groups=ONE_DENSE, rank_caches=())
    thread: Any = SimpleNamespace(scheduler=SimpleNamespace(connector=connector))
    worker = SimpleNamespace(kv_caches={"model.layers.0.self_attn": torch.zeros(1)})

    def unknown(config: Any, layer: torch.Tensor) -> Any:
        raise ValueError("nobody knows it")

    monkeypatch.setattr(wiring, "get_kv_transfer_group", lambda: worker)
    monkeypatch.setattr(wiring, "_layout", unknown)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    anything: Any = None
    assert wiring.why_not_moved(thread, config, anything) == "nobody knows it"
