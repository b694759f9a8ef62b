"""The device pool's free blocks in the order of their ranks: vLLM's free-block queue, with what comes back last.

Leans on vLLM: `FreeKVCacheBlockQueue` (a doubly linked list of `KVCacheBlock` from `fake_free_list_head` to
`fake_free_list_tail`), and on `BlockPool` taking victims from its front. It stays a linked list in eviction order, so
all that only reads or unlinks (`popleft`, `iter_blocks_after`, …) is vLLM's own; what differs is where a block enters:

* in front what holds nothing (no block hash), last freed first, as vLLM has it;
* then cached blocks by `kvmanager.eviction.device_ranks`: used once, used again, used often. Within the first two, the
  one freed earlier goes first (vLLM frees a chain's end first); of those used often, the coldest.

A score is the manager's (`kvmanager.index.hotness`: forward-decayed, so it needs no refreshing) and belongs to what
lies in the block: it is forgotten when the block is handed out or emptied. A block without one counts as used once,
when it was freed. Its rank is that of its score when it is freed, or scored while it is free. When a block is freed,
each rank drops what it has no room for to the end of the rank below, first block first; not when one is scored: that is
about to be used. A chain's beginning never goes before its end, because every use of the
end is a use of the beginning.

Invariants: `_keys` are the distinct places of free blocks, ascending; `_tails[key]` is the last free block of a place.
Only the last rank has more than one place: one for each score. Cost per block: one binary search in `_keys` where a
place comes or goes, and a move of 8 bytes for each place above it; otherwise O(1). Engine thread only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvmanager.eviction.device_ranks import SHARES, TWICE, Rank, rank_of, score_of_rest

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


EMPTY = -math.inf
"""Score of a block that holds nothing."""

Place: TypeAlias = tuple[int, float]
"""A rank, and a score in the last one."""
NOTHING: Place = (0, 0.0)
"""Place of a block that holds nothing."""
LAST: Place = (Rank.HOT + 1, 0.0)
"""Place of a block without a hash that vLLM wants handed out last: it is still being read (`unpin_blocks`)."""


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
        """By block id."""
        self._places = [NOTHING] * num_blocks
        """By block id, of those that are free."""
        self._keys: list[Place] = []
        self._tails: dict[Place, KVCacheBlock] = {}
        self._most = {rank: int(share * num_blocks) for rank, share in SHARES.items()}
        self._free = Counter[int]()
        """Free blocks of each rank."""
        for block in list(free):
            block.prev_free_block = block.next_free_block = None
            if block.block_hash is None:
                self._insert(block, NOTHING)
            else:
                self._rank(block)

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
            self._places = [(rank, order - self.now if rank == Rank.HOT else order) for rank, order in self._places]
            self.now = 0.0
            self._find_tails()
        self.now = max(self.now, now)
        return True

    def raise_score(self, block: KVCacheBlock, score: float) -> None:
        """Note that what lies in a block, free or in use, is at least so hot."""
        if score > self._scores[block.block_id]:
            self._scores[block.block_id] = score
            if is_free(block):
                self.remove(block)
                self._rank(block)

    def emptied(self, block: KVCacheBlock) -> None:
        """Note that a block, free or in use, holds nothing any more (its hash was taken from it)."""
        self._scores[block.block_id] = EMPTY
        if is_free(block):
            self.remove(block)
            self._insert(block, NOTHING)

    def all_emptied(self) -> None:
        """Note that no block holds anything any more. O(blocks)."""
        self._scores = [EMPTY] * len(self._scores)
        self._places = [NOTHING] * len(self._places)
        self._find_tails()

    def colder_than(self, score: float, wanted: int) -> int:
        """Count the first `wanted` victims that go before a block of `score`, used now. O(wanted)."""
        rank = rank_of(score, self.now)
        end: Place = (rank, score if rank is Rank.HOT else math.inf)
        for number, block in enumerate(self.iter_blocks_after(None)):
            if number == wanted or self._places[block.block_id] >= end:
                return number
        return min(wanted, self.num_free_blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the first victim."""
        block = super().popleft()
        del self._keys[: self._took([block])]
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` victims."""
        blocks = super().popleft_n(n)
        del self._keys[: self._took(blocks)]
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, from wherever it is; it keeps its score."""
        before = block.prev_free_block
        super().remove(block)
        place = self._places[block.block_id]
        self._free[place[0]] -= 1
        if self._tails[place] is block:
            # The head of the list is no block: its id, -1, must not be looked up.
            if before is not self.fake_free_list_head and before is not None and self._places[before.block_id] == place:
                self._tails[place] = before
            else:
                del self._tails[place]
                del self._keys[bisect_left(self._keys, place)]

    def append(self, block: KVCacheBlock) -> None:
        """Put back a block, at its place."""
        if block.block_hash is None:
            self._insert(block, LAST)
        else:
            self._rank(block)
            self._let_fall()

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
            self._scores[block.block_id], self._places[block.block_id] = EMPTY, NOTHING
        self._free[NOTHING[0]] += len(blocks)
        if NOTHING not in self._tails:
            self._tails[NOTHING] = blocks[-1]
            self._keys.insert(0, NOTHING)

    def _rank(self, block: KVCacheBlock) -> None:
        """Put a cached block at its score's place."""
        score = self._scores[block.block_id]
        if score == EMPTY:
            score = self._scores[block.block_id] = self.now
        rank = rank_of(score, self.now)
        self._insert(block, (rank, score if rank is Rank.HOT else 0.0))

    def _let_fall(self) -> None:
        """Move what a rank has no room for to the end of the rank below."""
        for rank in (Rank.HOT, Rank.AGAIN):
            while self._free[rank] > self._most[rank]:
                first = self._first_of(rank)
                self.remove(first)
                self._insert(first, (rank - 1, 0.0))

    def _first_of(self, rank: Rank) -> KVCacheBlock:
        """The next victim of a rank that has blocks."""
        place = bisect_left(self._keys, (rank, -math.inf))
        before = self._tails[self._keys[place - 1]] if place else self.fake_free_list_head
        assert before.next_free_block is not None
        return before.next_free_block

    def _insert(self, block: KVCacheBlock, place: Place) -> None:
        tail = self._tails.get(place)
        if tail is None:
            at = bisect_left(self._keys, place)
            self._keys.insert(at, place)
            tail = self._tails[self._keys[at - 1]] if at else self.fake_free_list_head
        after = tail.next_free_block
        assert after is not None
        block.prev_free_block, block.next_free_block = tail, after
        tail.next_free_block = after.prev_free_block = block
        self._tails[place] = block
        self._places[block.block_id] = place
        self._free[place[0]] += 1
        self.num_free_blocks += 1

    def _find_tails(self) -> None:
        """Read the books off the list, whose order is right but whose places have changed."""
        self._tails = {self._places[block.block_id]: block for block in self.iter_blocks_after(None)}
        self._keys = list(self._tails)
        self._free = Counter(self._places[block.block_id][0] for block in self.iter_blocks_after(None))

    def _took(self, blocks: Iterable[KVCacheBlock]) -> int:
        """Forget the scores of blocks taken from the front; returns how many places are gone with them."""
        gone = 0
        for block in blocks:
            place = self._places[block.block_id]
            self._scores[block.block_id] = EMPTY
            self._free[place[0]] -= 1
            if self._tails[place] is block:
                del self._tails[place]
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


# How hot a request's blocks are, as its plan and the device say: told to the queue before they can become victims.


class Scored(Protocol):
    """A request with what its plan says: `(end_block, score)` of known segments, the score of this use, the manager."""

    scores: Sequence[tuple[int, float]]
    now: float
    epoch: int


def score_found(queue: HotnessQueue, request: Scored, found: Iterable[KVCacheBlock]) -> None:
    """A request begins: tell the queue how hot the leading blocks are that the device has of it.

    Those that the plan does not know are used again all the same.
    """
    _check_manager(queue, request)
    blocks = list(found)
    known, score = request.scores[-1] if request.scores else (0, math.inf)
    if len(blocks) > known:
        request.scores = [*request.scores, (len(blocks), min(score, request.now + TWICE))]
    score_blocks(queue, request, blocks)


def score_blocks(queue: HotnessQueue, request: Scored, blocks: Sequence[KVCacheBlock]) -> None:
    """Tell the queue how hot a sequence's blocks are, used until now; blocks without a hash are skipped."""
    _check_manager(queue, request)
    used_for = queue.now - request.now
    rest = (math.inf, score_of_rest(request.scores, len(blocks), request.now))
    known = iter(request.scores)
    end_block, score = next(known, rest)
    for number, block in enumerate(blocks):
        while number >= end_block:
            end_block, score = next(known, rest)
        if block.block_hash is not None:
            queue.raise_score(block, score + used_for)


def _check_manager(queue: HotnessQueue, request: Scored) -> None:
    if request.epoch != queue.epoch:  # no plan, or from a manager that has been replaced: one use made now
        request.scores, request.now, request.epoch = (), queue.now, queue.epoch


def cached_blocks(pool: BlockPool, hashes: Iterable[Any]) -> Iterator[KVCacheBlock]:
    """The leading blocks of a prompt that the device holds."""
    for block_hash in hashes:
        cached = pool.get_cached_block(block_hash, [0])
        if cached is None:
            return
        yield cached[0]
