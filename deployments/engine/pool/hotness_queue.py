"""The device pool's free blocks, coldest first: vLLM's free-block queue, ordered by hotness instead of recency.

Leans on vLLM: `FreeKVCacheBlockQueue` (a doubly linked list of `KVCacheBlock` from `fake_free_list_head` to
`fake_free_list_tail`), and on `BlockPool` taking victims from its front. It stays a linked list in eviction order, so
all that only reads or unlinks (`popleft`, `iter_blocks_after`, …) is vLLM's own; what differs is where a block enters:

* in front what holds nothing (no block hash), last freed first, as vLLM has it;
* then cached blocks by score, coldest first, and among equals the one freed earlier (vLLM frees a chain's end first).

A score is the manager's (`kvmanager.index.hotness`: forward-decayed, so it needs no refreshing) and belongs to what
lies in the block: it is forgotten when the block is handed out or emptied. A block without one counts as used once,
when it was freed. A chain's beginning is never colder than its end, because every use of the end is a use of the
beginning.

Invariants: `_keys` are the distinct scores of free blocks, ascending; `_tails[key]` is the last free block of a score.
Cost per block: one binary search in `_keys` where a score comes or goes, and a move of 8 bytes for each score above
it (20 µs for 100,000 different ones; a segment's blocks share one); otherwise O(1). Engine thread only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


EMPTY = -math.inf
"""Score of a block that holds nothing."""
LAST = math.inf
"""Score of a block without a hash that vLLM wants handed out last: it is still being read (`unpin_blocks`)."""


class HotnessQueue(FreeKVCacheBlockQueue):
    """See the module's docstring.

    `now` is the score of one use made now, by the latest time that the replica has heard. `epoch` identifies the
    manager whose clock this is.
    """

    def __init__(self, free: Iterable[KVCacheBlock], num_blocks: int) -> None:
        """Take over the `free` blocks of a pool of `num_blocks`, in their order."""
        super().__init__([])
        self.now = 0.0
        self.epoch = 0
        self._past_epochs: set[int] = set()
        self._scores = [EMPTY] * num_blocks
        """By block id. A free block lies at its score's place."""
        self._keys: list[float] = []
        self._tails: dict[float, KVCacheBlock] = {}
        for block in list(free):
            block.prev_free_block = block.next_free_block = None
            self._insert(block, EMPTY if block.block_hash is None else self.now)

    def score(self, block: KVCacheBlock) -> float:
        """The hotness of what lies in a block; `EMPTY` when nothing does, or nothing is known of it."""
        return self._scores[block.block_id]

    def hear(self, epoch: int, now: float) -> bool:
        """Take over a manager's time; False: from a replaced manager, whose scores no longer apply.

        A new manager's clock starts again. Blocks here then keep their distance from `now`, so those that were hot
        under the old manager stay ahead. O(blocks), once per manager.
        """
        if epoch in self._past_epochs:
            return False
        if epoch != self.epoch:
            self._past_epochs.add(self.epoch)
            self.epoch = epoch
            self._scores = [score - self.now for score in self._scores]
            self.now = 0.0
            self._find_tails()
        self.now = max(self.now, now)
        return True

    def raise_score(self, block: KVCacheBlock, score: float) -> None:
        """Note that what lies in a block, free or in use, is at least so hot."""
        if score > self._scores[block.block_id]:
            if is_free(block):
                self.remove(block)
                self._insert(block, score)
            else:
                self._scores[block.block_id] = score

    def emptied(self, block: KVCacheBlock) -> None:
        """Note that a block, free or in use, holds nothing any more (its hash was taken from it)."""
        if is_free(block):
            self.remove(block)
            self._insert(block, EMPTY)
        else:
            self._scores[block.block_id] = EMPTY

    def all_emptied(self) -> None:
        """Note that no block holds anything any more. O(blocks)."""
        self._scores = [EMPTY] * len(self._scores)
        self._find_tails()

    def colder_than(self, score: float, wanted: int) -> int:
        """Count the first `wanted` victims colder than `score`, up to the first that is not. O(wanted)."""
        for number, block in enumerate(self.iter_blocks_after(None)):
            if number == wanted or self._scores[block.block_id] >= score:
                return number
        return min(wanted, self.num_free_blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the coldest block."""
        block = super().popleft()
        del self._keys[: self._took([block])]
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the `n` coldest blocks."""
        blocks = super().popleft_n(n)
        del self._keys[: self._took(blocks)]
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, from wherever it is; it keeps its score."""
        before = block.prev_free_block
        super().remove(block)
        key = self._scores[block.block_id]
        if self._tails[key] is block:
            # The head of the list is no block: its id, -1, must not be looked up.
            if before is not self.fake_free_list_head and before is not None and self._scores[before.block_id] == key:
                self._tails[key] = before
            else:
                del self._tails[key]
                del self._keys[bisect_left(self._keys, key)]

    def append(self, block: KVCacheBlock) -> None:
        """Put back a block, at its place."""
        if block.block_hash is None:
            self._insert(block, LAST)
        else:
            score = self._scores[block.block_id]
            self._insert(block, self.now if score == EMPTY else score)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put back blocks, each at its place."""
        for block in blocks:
            self.append(block)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put blocks in front of all others: those that hold nothing."""
        if not blocks:
            return
        super().prepend_n(blocks)
        for block in blocks:
            self._scores[block.block_id] = EMPTY
        if EMPTY not in self._tails:
            self._tails[EMPTY] = blocks[-1]
            self._keys.insert(0, EMPTY)

    def _insert(self, block: KVCacheBlock, key: float) -> None:
        tail = self._tails.get(key)
        if tail is None:
            place = bisect_left(self._keys, key)
            self._keys.insert(place, key)
            tail = self._tails[self._keys[place - 1]] if place else self.fake_free_list_head
        after = tail.next_free_block
        assert after is not None
        block.prev_free_block, block.next_free_block = tail, after
        tail.next_free_block = after.prev_free_block = block
        self._tails[key] = block
        self._scores[block.block_id] = key
        self.num_free_blocks += 1

    def _find_tails(self) -> None:
        """Read `_keys` and `_tails` off the list, whose order is right but whose scores have all changed."""
        self._tails = {self._scores[block.block_id]: block for block in self.iter_blocks_after(None)}
        self._keys = list(self._tails)

    def _took(self, blocks: Iterable[KVCacheBlock]) -> int:
        """Forget the scores of blocks taken from the front; returns how many scores are gone with them."""
        gone = 0
        for block in blocks:
            key = self._scores[block.block_id]
            self._scores[block.block_id] = EMPTY
            if self._tails[key] is block:
                del self._tails[key]
                gone += 1
        return gone


def is_free(block: KVCacheBlock) -> bool:
    """Whether a block lies in its pool's free queue."""
    return block.next_free_block is not None


def order_by_hotness(pool: BlockPool) -> HotnessQueue:
    """Replace a pool's free-block queue. On the engine thread, between two steps."""
    queue = HotnessQueue(pool.free_block_queue.get_all_free_blocks(), pool.num_gpu_blocks)
    pool.free_block_queue = queue
    return queue


def order_by_recency(pool: BlockPool) -> None:
    """Give a pool vLLM's own free-block queue again. On the engine thread, between two steps."""
    pool.free_block_queue = FreeKVCacheBlockQueue(pool.free_block_queue.get_all_free_blocks())


# How hot a request's blocks are, as its plan says: told to the pool's queue before they can become victims.
#
# New tokens, which the manager does not know yet, count as used once. On the engine thread.


class Scored(Protocol):
    """A request with what its plan says: `(end_block, score)` of known segments, the score of this use, the manager."""

    scores: Sequence[tuple[int, float]]
    now: float
    epoch: int


def score_blocks(queue: HotnessQueue, request: Scored, blocks: Iterable[KVCacheBlock]) -> None:
    """Tell the queue how hot a sequence's first blocks are; blocks without a hash are skipped."""
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
