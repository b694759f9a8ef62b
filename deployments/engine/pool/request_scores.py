"""How hot a request's blocks are, as its plan says: told to the pool's queue before they can become victims.

New tokens, which the manager does not know yet, count as used once. On the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from deployments.engine.pool.hotness_queue import HotnessQueue


class Scored(Protocol):
    """A request with what its plan says: `(end_block, score)` of known segments, the score of this use, the manager."""

    scores: Sequence[tuple[int, float]]
    now: float
    epoch: int


def score_blocks(queue: HotnessQueue, request: Scored, blocks: Iterable[KVCacheBlock]) -> None:
    """Tell the queue how hot a sequence's first blocks are, as far as they hold anything."""
    if request.epoch != queue.epoch:  # no plan, or from a manager that has been replaced: one use made now
        request.scores, request.now, request.epoch = (), queue.now, queue.epoch
    known = iter(request.scores)
    end_block, score = next(known, (math.inf, request.now))
    for number, block in enumerate(blocks):
        while number >= end_block:
            end_block, score = next(known, (math.inf, request.now))
        if block.block_hash is not None:
            queue.raise_score(block, score)


def cached_blocks(pool: BlockPool, hashes: Iterable[Any]) -> Iterator[KVCacheBlock]:
    """The leading blocks of a prompt that the device holds."""
    for block_hash in hashes:
        cached = pool.get_cached_block(block_hash, [0])
        if cached is None:
            return
        yield cached[0]
