"""vLLM's own `KVCacheManager` for tests, without an engine: it counts blocks, and no tensor is behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

BLOCK = 32
CHUNK = 512
"""Tokens of a prompt that a step computes at most."""
LONGEST = 16384
SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def kv_manager(windows: Sequence[int | None] = (None,), blocks: int = 1000, caches: bool = True) -> KVCacheManager:
    """A manager of `blocks` free blocks for groups with these windows; None: of full attention."""
    specs: list[KVCacheSpec] = [
        FullAttentionSpec(**SHAPE) if window is None else SlidingWindowSpec(**SHAPE, sliding_window=window)
        for window in windows
    ]
    groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)]
    retention = 0 if any(windows) else None  # as the engine's core sets it
    config = KVCacheConfig(blocks + 1, [], groups, prefix_cache_retention_interval=retention)
    return KVCacheManager(config, LONGEST, BLOCK, BLOCK, max_in_flight_tokens=CHUNK, enable_caching=caches)


def request(name: str, tokens: int, at: float = 0.0, answer: int = 10) -> Request:
    """A prompt: every longer one begins with it."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    return Request(name, [1] * tokens, params, None, arrival_time=at, block_hasher=_hashes)


def _hashes(request: Request) -> list[Any]:
    return [n.to_bytes(32, "big") for n in range(len(request.block_hashes), request.num_tokens // BLOCK)]


def admit(manager: KVCacheManager, waiting: Request) -> bool:
    """Return whether vLLM admits a request now: it gets the blocks of its first chunk."""
    blocks, found, _ = manager.get_computed_blocks(waiting)
    chunk = min(CHUNK, waiting.num_tokens - found)
    slots = manager.allocate_slots(waiting, chunk, found, blocks if found else None, full_sequence_must_fit=True)
    if slots is not None:
        waiting.num_computed_tokens = found + chunk
    return slots is not None


def compute(manager: KVCacheManager, waiting: Request) -> Request:
    """Admit a request and compute its whole prompt."""
    assert admit(manager, waiting)
    while waiting.num_computed_tokens < waiting.num_tokens:
        chunk = min(CHUNK, waiting.num_tokens - waiting.num_computed_tokens)
        assert manager.allocate_slots(waiting, chunk) is not None
        waiting.num_computed_tokens += chunk
    return waiting
