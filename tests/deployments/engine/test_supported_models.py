"""Models whose KV crosskv does not handle are refused in words, before anything is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from deployments.engine.connector import UnsupportedModelError, check_supported

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


class LaterAttentionSpec(FullAttentionSpec):
    """What a later vLLM may derive from full attention; nobody has tested it."""


def config(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{n}.self_attn"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_plain_full_attention_is_accepted() -> None:
    check_supported(config(FullAttentionSpec(**SHAPE)))


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowSpec(**SHAPE, sliding_window=512),
        FullAttentionSpec(**SHAPE, sliding_window=512),
        FullAttentionSpec(**SHAPE, attention_chunk_size=512),
        FullAttentionSpec(**SHAPE, non_causal=True),
        FullAttentionSpec(**SHAPE, head_size_v=32),
        MLAAttentionSpec(**SHAPE),
        LaterAttentionSpec(**SHAPE),
    ],
    ids=["sliding window", "sliding window as full", "chunked", "prefix LM", "unequal K and V", "MLA", "unknown"],
)
def test_any_other_attention_is_refused_with_the_way_out(spec: KVCacheSpec) -> None:
    with pytest.raises(UnsupportedModelError, match=r"set kv\.enabled to false"):
        check_supported(config(spec))


def test_a_hybrid_model_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedModelError, match=r"2 kinds of KV cache.*set kv\.enabled to false"):
        check_supported(config(FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=512)))
