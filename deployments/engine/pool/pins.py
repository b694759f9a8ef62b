"""Pins in the device pool: cached blocks that are held by reference count, so that vLLM cannot hand them out.

Bounded three ways: at most `most_blocks` are pinned; every pin ends by itself, whatever becomes of the manager that
ordered it; and pins give way when a request could not run beside them (`release_all`). Engine thread only.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pin:
    block: KVCacheBlock
    until: float


@dataclass(frozen=True, slots=True)
class Pinned:
    """`found`: how many of the leading hashes are pinned now; `added`: those that were not before."""

    found: int
    added: tuple[bytes, ...]
    full: bool
    """It ended because no more may be pinned, not because a block is missing."""


class PoolPins:
    """See the module's docstring. `until` and `now` are on one clock, in seconds."""

    def __init__(self, pool: BlockPool, most_blocks: int) -> None:
        self.gave_way = 0
        """Times that all pins were released for a request."""
        self._pool = pool
        self._most_blocks = most_blocks
        self._pins: dict[bytes, _Pin] = {}
        self._ends: list[tuple[float, bytes]] = []
        """A heap with an entry per pin, and stale ones of pins that were prolonged or ended."""

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, hashes: Sequence[bytes], until: float) -> Pinned:
        """Pin blocks up to the first that is not in the pool, or prolong their pins. O(log n) per block."""
        added: list[bytes] = []
        for found, block_hash in enumerate(hashes):
            pin = self._pins.get(block_hash)
            if pin is None:
                cached = self._pool.get_cached_block(block_hash, [0])  # type: ignore[arg-type]
                if cached is None:
                    return Pinned(found, tuple(added), full=False)
                if len(self._pins) >= self._most_blocks:
                    return Pinned(found, tuple(added), full=True)
                self._pool.touch(cached)
                self._pins[block_hash] = _Pin(cached[0], until)
                added.append(block_hash)
            elif pin.until < until:
                pin.until = until
            else:
                continue
            heapq.heappush(self._ends, (until, block_hash))
        return Pinned(len(hashes), tuple(added), full=False)

    def unpin(self, hashes: Iterable[bytes]) -> int:
        """End pins; returns how many there were. The blocks stay cached. Give the hashes in the sequence's order."""
        blocks = [pin.block for block_hash in hashes if (pin := self._pins.pop(block_hash, None)) is not None]
        self._pool.free_blocks(reversed(blocks))
        if len(self._ends) > 2 * len(self._pins) + 64:
            self._ends = [(pin.until, block_hash) for block_hash, pin in self._pins.items()]
            heapq.heapify(self._ends)
        return len(blocks)

    def expire(self, now: float, most: int) -> bool:
        """End up to `most` pins whose time is over; returns whether there are more."""
        over: list[bytes] = []
        while self._ends and self._ends[0][0] <= now and len(over) < most:
            until, block_hash = heapq.heappop(self._ends)
            pin = self._pins.get(block_hash)
            if pin is not None and pin.until == until:
                over.append(block_hash)
        self.unpin(over)
        return bool(self._ends) and self._ends[0][0] <= now

    def release_all(self) -> int:
        """End all pins."""
        return self.unpin(list(self._pins))

    def give_way(self) -> bool:
        """End all pins, because a request would wait or be preempted for want of blocks; whether there were any."""
        if not self._pins:
            return False
        self.gave_way += 1
        logger.warning("%d pinned device blocks are released: a request cannot run beside them", len(self._pins))
        self.release_all()
        return True
