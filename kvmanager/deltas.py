"""Deltas: every change of placement as a numbered event, kept in a bounded ring.

A mirror (`kvmanager.mirror`) asks for what came after the last number it knows. What has left the ring cannot be told
piecemeal any more: the answer is a snapshot then, the whole placement written as the events that would build it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvmanager.keys import BlockHash, SegmentKey

Event: TypeAlias = (
    tuple[Literal["seg+"], str, str, SegmentKey, int, int]  # tier, holder, key, start_block, num_blocks
    | tuple[Literal["seg-"], str, str, SegmentKey]  # tier, holder, key
    | tuple[Literal["seg0"], str, str]  # tier, holder: all that was there is gone
    | tuple[Literal["dev+", "dev-"], str, list[BlockHash]]  # replica, blocks
    | tuple[Literal["dev0"], str]  # replica: holds nothing any more
)

NOTHING_SEEN = -1
"""The number to ask with when nothing is known yet: answered by a snapshot."""


@dataclass(frozen=True, slots=True)
class Deltas:
    """Events ``first`` to ``last`` of the manager named by ``epoch``; ``last == first - 1`` when there is none.

    A snapshot is not numbered within: it describes the placement after event ``last``.
    """

    epoch: int
    first: int
    last: int
    events: list[Event]
    snapshot: bool


class DeltaLog:
    """The last ``capacity`` events, numbered from 1. One thread."""

    def __init__(self, epoch: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the log of deltas needs room for at least one event, got {capacity}")
        self._epoch = epoch
        self._capacity = capacity
        self._ring: list[Event] = []
        self.last = 0
        """Number of the newest event."""

    def append(self, event: Event) -> None:
        """Number and keep an event."""
        if self.last < self._capacity:
            self._ring.append(event)
        else:
            self._ring[self.last % self._capacity] = event
        self.last += 1

    def since(self, seq: int, limit: int, placement: Callable[[], Iterable[Event]]) -> Deltas:
        """Return at most ``limit`` events after number ``seq``, or a snapshot of ``placement()`` if some are lost.

        O(events returned); a snapshot is O(index) and ignores ``limit``. Raises ValueError for a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1 event, got {limit}")
        if seq < max(0, self.last - self._capacity) or seq > self.last:
            return Deltas(self._epoch, first=1, last=self.last, events=list(placement()), snapshot=True)
        last = min(self.last, seq + limit)
        events = [self._ring[number % self._capacity] for number in range(seq, last)]
        return Deltas(self._epoch, first=seq + 1, last=last, events=events, snapshot=False)
