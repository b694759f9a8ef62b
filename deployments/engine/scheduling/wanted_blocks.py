"""KV that waiting requests need: the KV of running requests says nothing of the requests that they keep out.

What a waiting request shares with running ones it does not need a second time: a long system prompt, above all.

Leans on vLLM's `Scheduler`: `waiting` (a deque, or by priority a heap in `_heap`), `running`, `max_num_active_reqs`,
`max_num_scheduled_tokens`, `num_waiting_for_streaming_input`, `_is_blocked_waiting_status`, `_holds_kv_blocks`,
`block_size`, `kv_cache_manager` (`prefix_cache_lookup_enabled`, `empty_kv_cache_blocks`, `get_block_ids`,
`max_model_len`, `block_pool.get_cached_block`), its `coordinator` (`find_longest_cache_hit`,
`get_num_blocks_to_allocate`, `single_type_managers`, of class `FullAttentionManager`); of a `Request` `num_tokens`,
`num_prompt_tokens`, `num_computed_tokens`, `block_hashes`; of a block `ref_cnt`: one without a reference is free,
though it may be found again.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

LOOKED_AT = 8
"""Requests at the queue's head. A long queue is as short of KV as these."""


def needed_blocks(scheduler: Scheduler, request: Request) -> int:
    """Free blocks, of all groups, that a waiting request still takes until its first token is there.

    Neither those that it holds, nor those that it finds in the prefix cache with a reference, which are not free. On
    the engine's thread; O(log n) of its blocks, or O(n) where layers have windows: their blocks say nothing of earlier
    ones.
    """
    manager = scheduler.kv_cache_manager
    if not _is_one_dense_group(manager):
        return _needed_in_groups(scheduler, request)
    needed = -(-(request.num_tokens + 1) // scheduler.block_size)
    if scheduler._holds_kv_blocks(request):
        return needed - len(manager.get_block_ids(request.request_id)[0])
    return needed - _shared_blocks(scheduler, request)


def _is_one_dense_group(manager: KVCacheManager) -> bool:
    """Whether one block table says all, and a sequence's blocks stay in it until the sequence ends."""
    return [type(each) for each in manager.coordinator.single_type_managers] == [FullAttentionManager]


def _needed_in_groups(scheduler: Scheduler, request: Request) -> int:
    """The same, as vLLM counts it when it admits a request: all of it, windows at most once, and its first chunk."""
    manager = scheduler.kv_cache_manager
    blocks, computed = manager.empty_kv_cache_blocks.blocks, request.num_computed_tokens
    if not scheduler._holds_kv_blocks(request) and manager.prefix_cache_lookup_enabled(request):
        blocks, computed, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)

    def to_allocate(tokens: int, whole: bool) -> int:
        return manager.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            tokens,
            blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=tokens,
            apply_admission_cap=whole,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )

    tokens = min(request.num_tokens + 1, manager.max_model_len)
    chunk = min(tokens, computed + scheduler.max_num_scheduled_tokens)
    return max(to_allocate(tokens, True), to_allocate(chunk, False))


def _shared_blocks(scheduler: Scheduler, request: Request) -> int:
    """Number of leading blocks that others hold. A request that holds a block holds all before it: binary search."""
    manager = scheduler.kv_cache_manager
    if not manager.prefix_cache_lookup_enabled(request):
        return 0

    def is_free(block_hash: Any) -> bool:
        found = manager.block_pool.get_cached_block(block_hash, [0])
        return found is None or found[0].ref_cnt == 0

    most = (request.num_tokens - 1) // scheduler.block_size  # the last token is always computed
    return bisect_left(request.block_hashes, True, hi=min(most, len(request.block_hashes)), key=is_free)


def wanted_blocks(scheduler: Scheduler, free_blocks: int) -> int:
    """Free blocks that the first waiting requests need, of which the very first one does not fit into what is free.

    0 where it fits, and where run slots are what is missing. Of a heap's first ones, which need not be the next. On the
    engine's thread; the time of a few `needed_blocks`.
    """
    if len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= scheduler.max_num_active_reqs:
        return 0
    waiting: Any = scheduler.waiting
    first = islice(getattr(waiting, "_heap", waiting), LOOKED_AT)
    ready = [request for request in first if not scheduler._is_blocked_waiting_status(request.status)]
    if not ready or needed_blocks(scheduler, ready[0]) <= free_blocks:
        return 0
    return sum(needed_blocks(scheduler, request) for request in ready)
