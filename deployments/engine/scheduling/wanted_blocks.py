"""KV that waiting requests need: the KV of running requests says nothing of the requests that they keep out.

What a waiting request shares with running ones it does not need a second time: a long system prompt, above all.

Leans on vLLM's `Scheduler`: `waiting` (a deque, or by priority a heap in `_heap`), `running`, `max_num_active_reqs`,
`num_waiting_for_streaming_input`, `_is_blocked_waiting_status`, `_holds_kv_blocks`, `block_size`, `kv_cache_manager`
(`enable_caching`, `get_block_ids`, `block_pool.get_cached_block`); of a `Request` `num_tokens`, `block_hashes`,
`skip_reading_prefix_cache`; of a block `ref_cnt`: one without a reference is free, though it may be found again.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

LOOKED_AT = 8
"""Requests at the queue's head. A long queue is as short of KV as these."""


def needed_blocks(scheduler: Scheduler, request: Request) -> int:
    """Free blocks that a waiting request still takes until its first token is there. On the engine's thread; O(log n).

    Neither those that it holds, nor those that it finds in the prefix cache with a reference, which are not free.
    """
    needed = -(-(request.num_tokens + 1) // scheduler.block_size)
    if scheduler._holds_kv_blocks(request):
        return needed - len(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])
    return needed - _shared_blocks(scheduler, request)


def _shared_blocks(scheduler: Scheduler, request: Request) -> int:
    """Number of leading blocks that others hold. A request that holds a block holds all before it: binary search."""
    manager = scheduler.kv_cache_manager
    if request.skip_reading_prefix_cache or not manager.enable_caching:
        return 0

    def is_free(block_hash: Any) -> bool:
        found = manager.block_pool.get_cached_block(block_hash, [0])
        return found is None or found[0].ref_cnt == 0

    most = (request.num_tokens - 1) // scheduler.block_size  # the last token is always computed
    return bisect_left(request.block_hashes, True, hi=min(most, len(request.block_hashes)), key=is_free)


def wanted_blocks(scheduler: Scheduler, free_blocks: int) -> int:
    """Free blocks that the first waiting requests need, of which the very first one does not fit into what is free.

    0 where it fits, and where run slots are what is missing. Of a heap's first ones, which need not be the next. On the
    engine's thread; O(log n) of their blocks.
    """
    if len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= scheduler.max_num_active_reqs:
        return 0
    waiting: Any = scheduler.waiting
    first = islice(getattr(waiting, "_heap", waiting), LOOKED_AT)
    ready = [request for request in first if not scheduler._is_blocked_waiting_status(request.status)]
    if not ready or needed_blocks(scheduler, ready[0]) <= free_blocks:
        return 0
    return sum(needed_blocks(scheduler, request) for request in ready)
