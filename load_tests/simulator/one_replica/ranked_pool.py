"""A device pool that evicts by rank, as a replica's free-block queue does (`kvmanager.eviction.device_ranks`)."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from kvmanager.eviction.device_ranks import SHARES, Rank, rank_of
from kvmanager.segments.keys import BlockHash


class RankedPool:
    """Blocks by name, held by requests or idle. With equal scores it is vLLM's own order: least recently used first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._users: dict[BlockHash, int] = {}
        self._scores: dict[BlockHash, float] = {}
        self._idle: dict[Rank, OrderedDict[BlockHash, int]] = {rank: OrderedDict() for rank in Rank}
        """Cached and not held by any request, oldest first, with the number of the heap entry that counts."""
        self._coldest: list[tuple[float, int, BlockHash]] = []
        """Those that are hot."""
        self._numbers = itertools.count()
        self._unnamed = 0

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._users

    @property
    def free(self) -> int:
        """Blocks that no request holds, cached or not."""
        return self.blocks - self._unnamed - len(self._users) + sum(map(len, self._idle.values()))

    def leading_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are here. O(result)."""
        for position, block in enumerate(hashes):
            if block not in self._users:
                return position
        return len(hashes)

    def hold(self, named: Sequence[tuple[BlockHash, float]], unnamed: int = 0) -> bool:
        """Hold blocks, with their scores, those that are not here too, and some without a name; False: no room.

        What is here already keeps a higher score.
        """
        needed = unnamed + sum(not self._users.get(block) for block, _ in named)
        if needed > self.free:
            return False
        self._unnamed += unnamed
        for block, score in named:
            if self._users.get(block) == 0:
                for idle in self._idle.values():
                    idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
            self._scores[block] = max(score, self._scores.get(block, score))
        while len(self._users) + self._unnamed > self.blocks:
            victim = self._victim()
            del self._users[victim], self._scores[victim]
        return True

    def let_go(self, named: Sequence[BlockHash], now: float, unnamed: int = 0) -> None:
        """End a hold; one use scores `now`. The last block is freed first, so that it goes first among equals."""
        self._unnamed -= unnamed
        for block in reversed(named):
            self._users[block] -= 1
            if not self._users[block]:
                self._free(block, rank_of(self._scores[block], now))

    def _free(self, block: BlockHash, rank: Rank) -> None:
        number = self._idle[rank][block] = next(self._numbers)
        if rank is Rank.HOT:
            heapq.heappush(self._coldest, (self._scores[block], number, block))
        if rank > Rank.ONCE and len(self._idle[rank]) > int(SHARES[rank] * self.blocks):
            self._free(self._first_of(rank), Rank(rank - 1))

    def _victim(self) -> BlockHash:
        return self._first_of(next(rank for rank in Rank if self._idle[rank]))

    def _first_of(self, rank: Rank) -> BlockHash:
        if rank is not Rank.HOT:
            return self._idle[rank].popitem(last=False)[0]
        while True:
            _, number, block = heapq.heappop(self._coldest)
            if self._idle[rank].get(block) == number:
                del self._idle[rank][block]
                return block
