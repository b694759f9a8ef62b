"""How hot a request's blocks are, as its plan says: told to the pool's queue before they can become victims.

New tokens, which the manager does not know yet, count as used once. On the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from deployments.engine.pool.hotness_queue import HotnessQueue
    from deployments.engine.tracked_request import TrackedRequest


def score_blocks(queue: HotnessQueue, tracked: TrackedRequest, blocks: Iterable[KVCacheBlock]) -> None:
    """Tell the queue how hot a sequence's first blocks are, as far as they hold anything."""
    if tracked.epoch != queue.epoch:  # no plan, or from a manager that has been replaced: one use made now
        tracked.scores, tracked.now, tracked.epoch = (), queue.now, queue.epoch
    known = iter(tracked.scores)
    end_block, score = next(known, (math.inf, tracked.now))
    for number, block in enumerate(blocks):
        while number >= end_block:
            end_block, score = next(known, (math.inf, tracked.now))
        if block.block_hash is not None:
            queue.raise_score(block, score)


def cached_blocks(pool: BlockPool, hashes: Iterable[Any]) -> Iterator[KVCacheBlock]:
    """The leading blocks of a prompt that the device holds."""
    for block_hash in hashes:
        cached = pool.get_cached_block(block_hash, [0])
        if cached is None:
            return
        yield cached[0]
