"""A device pool that evicts by score, as a replica's free-block queue does: coldest first, then longest idle."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from kvmanager.segments.keys import BlockHash

UNNAMED = float("-inf")
"""Score of a block without a name: it is handed out first."""


class ScoredPool:
    """Blocks by name, held by requests or idle. With equal scores it is vLLM's own order: least recently used first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._users: dict[BlockHash, int] = {}
        self._scores: dict[BlockHash, float] = {}
        self._idle: dict[BlockHash, int] = {}
        """Cached and not held by any request, with the number of the heap entry that counts."""
        self._order: list[tuple[float, int, BlockHash]] = []
        self._numbers = itertools.count()
        self._unnamed = 0

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._users

    @property
    def free(self) -> int:
        """Blocks that no request holds, cached or not."""
        return self.blocks - self._unnamed - len(self._users) + len(self._idle)

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
        needed = unnamed + sum(block not in self._users or block in self._idle for block, _ in named)
        if needed > self.free:
            return False
        self._unnamed += unnamed
        for block, score in named:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
            self._scores[block] = max(score, self._scores.get(block, score))
        while len(self._users) + self._unnamed > self.blocks:
            _, number, block = heapq.heappop(self._order)
            if self._idle.get(block) == number:
                del self._idle[block], self._users[block], self._scores[block]
        return True

    def let_go(self, named: Sequence[BlockHash], unnamed: int = 0) -> None:
        """End a hold. The last block is freed first, so that it goes first among equals."""
        self._unnamed -= unnamed
        for block in reversed(named):
            self._users[block] -= 1
            if not self._users[block]:
                number = self._idle[block] = next(self._numbers)
                heapq.heappush(self._order, (self._scores[block], number, block))
