"""How hot a request's blocks are, told to the pool's queue before they can become victims. On the engine thread.

A request's plan says how hot its prompt is. What follows the known part of a prompt that comes back counts as used
again with it; other new tokens count as used once.

Leans on vLLM's `KVCacheManager`: `block_pool.blocks`, `get_block_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.engine.pool.hotness_queue import HotnessQueue, cached_blocks, score_blocks, score_found
from deployments.engine.tracked_request import TrackedRequest
from kvmanager.moves.plan import Plan

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@dataclass(slots=True)
class PromptUse:
    """One use of a prompt. A `deployments.engine.pool.hotness_queue.Scored`."""

    scores: Sequence[tuple[int, float]] = ()
    """`(end_block, score)` of the known segments that the prompt begins with."""
    now: float = 0.0
    """Score of the use that this request is."""
    epoch: int = 0
    """Of the manager that said so."""


class RequestScores:
    """See the module's docstring."""

    def __init__(self, kv_cache_manager: KVCacheManager, block_size: int) -> None:
        """Of a model with one group of layers: of others no queue is ordered by hotness."""
        self._kv_cache_manager = kv_cache_manager
        self._block_size = block_size
        self._queue: HotnessQueue | None = None
        self._uses: dict[str, PromptUse] = {}
        """By request. Empty: no queue is ordered by hotness."""

    def order_by(self, queue: HotnessQueue | None) -> None:
        """Use the pool's free blocks by hotness from now on; None: they go in vLLM's own order, and no score counts."""
        self._queue = queue

    def entered(self, tracked: TrackedRequest, plan: Plan | None) -> None:
        """A request has entered: what the device has of its prompt is as hot as its plan says."""
        if self._queue is None:
            return
        use = self._uses[tracked.request.request_id] = PromptUse()
        if plan and self._queue.hear(plan.epoch, plan.now):
            use.scores, use.now, use.epoch = plan.scores, plan.now, plan.epoch
        pool = self._kv_cache_manager.block_pool
        score_found(self._queue, use, cached_blocks(pool, tracked.request.block_hashes))

    def score(self, tracked: TrackedRequest) -> None:
        """Tell the queue how hot the blocks are that a request has."""
        if self._queue is None:
            return
        ids = self._kv_cache_manager.get_block_ids(tracked.request.request_id)[0]
        if not tracked.saving.limits.save_answer:
            ids = ids[: tracked.request.num_prompt_tokens // self._block_size]
        use = self._uses.setdefault(tracked.request.request_id, PromptUse())
        blocks = self._kv_cache_manager.block_pool.blocks
        score_blocks(self._queue, use, [blocks[block_id] for block_id in ids])

    def finished(self, tracked: TrackedRequest) -> None:
        """A request has ended: score the blocks that it has once more."""
        self.score(tracked)
        self._uses.pop(tracked.request.request_id, None)
