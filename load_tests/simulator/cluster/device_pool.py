"""A replica's device pool as vLLM keeps it: blocks of running requests are pinned, the others are cached until needed.

Freed blocks are evicted in the order in which they were freed, a request's last block first. (A server's replicas order
them by hotness; the simulated ones do not, so that routers are compared with the plainest device.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmanager.segments.keys import BlockHash


@dataclass(slots=True)
class Held:
    """What one request holds of a pool."""

    named: list[BlockHash] = field(default_factory=list)
    """Cached blocks, which others may use too."""
    unnamed: int = 0
    """Blocks that no other request can find: of the answer, not computed yet, or computed twice."""


class DevicePool:
    """Blocks of one replica. All methods are O(blocks named)."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._users: dict[BlockHash, int] = {}
        """Of each cached block: running requests that hold it."""
        self._idle: dict[BlockHash, None] = {}
        """Cached and not held by any request; the first goes first."""
        self._unnamed = 0

    def leading_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prompt are cached."""
        for position, block in enumerate(hashes):
            if block not in self._users:
                return position
        return len(hashes)

    def acquire(self, hashes: Sequence[BlockHash], device_blocks: int, answer_blocks: int) -> Held | None:
        """Hold the leading ``device_blocks``, which are cached, and room for the rest; None if that is not free now.

        Cached blocks that have to go are in `take_evicted` afterwards.
        """
        reused = list(hashes[:device_blocks])
        needed = len(hashes) - device_blocks + answer_blocks
        idle = len(self._idle) - sum(block in self._idle for block in reused)
        if needed > self.blocks - len(self._users) - self._unnamed + idle:
            return None
        for block in reused:
            self._users[block] += 1
            self._idle.pop(block, None)
        self._unnamed += needed
        return Held(reused, needed)

    def take_evicted(self) -> list[BlockHash]:
        """Evict what no longer has room, and return it."""
        evicted: list[BlockHash] = []
        while len(self._users) + self._unnamed > self.blocks:
            block = next(iter(self._idle))
            del self._idle[block], self._users[block]
            evicted.append(block)
        return evicted

    def publish(self, held: Held, blocks: Sequence[BlockHash]) -> list[BlockHash]:
        """Name blocks that a request holds and has filled; return those that were not cached yet."""
        new = [block for block in blocks if block not in self._users]
        self._users.update(dict.fromkeys(new, 1))
        held.named += new
        held.unnamed -= len(new)
        self._unnamed -= len(new)
        return new

    def release(self, held: Held) -> None:
        """End a request's hold. Its named blocks stay cached until their room is needed, the last goes first."""
        self._unnamed -= held.unnamed
        for block in reversed(held.named):
            self._users[block] -= 1
            if not self._users[block]:
                self._idle[block] = None

    def bring(self, blocks: Sequence[BlockHash]) -> list[BlockHash]:
        """Cache blocks without a request, where there is room for all of them; return the new ones."""
        held = self.acquire(blocks, 0, 0)
        if held is None:
            return []
        new = self.publish(held, blocks)
        self.release(held)
        return new
