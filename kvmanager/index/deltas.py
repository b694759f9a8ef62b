"""Deltas: every change of placement as a numbered event, kept in a bounded ring.

A mirror (`kvmanager.routing.mirror`) asks for what came after the last number it knows. What has left the ring cannot
be told piecemeal any more: then the answer begins a snapshot, the whole placement as the events that would build it, in
parts.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from kvmanager.segments.keys import BlockHash, SegmentKey

Event: TypeAlias = (
    tuple[Literal["seg+"], str, str, SegmentKey, int, bytes]  # tier, holder, key, start_block, marks of its blocks
    | tuple[Literal["seg-"], str, str, SegmentKey, bytes]  # tier, holder, key, mark of its first block
    | tuple[Literal["seg0"], str, str]  # tier, holder: all that was there is gone
    | tuple[Literal["dev+", "dev-"], str, list[BlockHash]]  # replica, blocks
    | tuple[Literal["dev0"], str]  # replica: holds nothing any more
)

HASHES_PER_EVENT = 512
"""Most device blocks in one event: an answer is bounded by the segments and blocks in it."""


class Position(NamedTuple):
    """How far a mirror is: the number of the last event it knows, and, while it is told a snapshot, the next part."""

    seq: int
    snapshot_id: int = 0
    """0: it is told none."""
    part: int = 0


NOTHING_SEEN = Position(-1)
"""What to ask with when nothing is known yet: answered by a snapshot."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a snapshot (`kvmanager.index.snapshots`): where some segments and blocks were when it was made."""

    snapshot_id: int
    number: int
    """Counts from 0; part 0 starts the snapshot over."""
    last: bool
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Deltas:
    """Events ``first`` to ``last`` of the manager named by ``epoch``; ``last == first - 1`` when there is none."""

    epoch: int
    first: int
    last: int
    events: list[Event]
    part: Part | None = None
    """Made after event ``last``; when it is number 0, ``events`` do not matter."""
    more: bool = False
    """Whether there is something left to be told now."""
    waits: bool = False
    """Whether that is a snapshot whose turn has not come: ask again. Nothing else is told then that a mirror needs."""


def weight(event: Event) -> int:
    """Return how many segments or blocks an event is about."""
    return len(event[2]) if event[0] == "dev+" or event[0] == "dev-" else 1


class DeltaLog:
    """The last ``capacity`` events, numbered from 1. One thread."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the log of deltas needs room for at least one event, got {capacity}")
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

    def since(self, seq: int, limit: int) -> list[Event] | None:
        """Return events after number ``seq``, about ``limit`` segments and blocks; None if some are lost.

        O(limit). Raises ValueError for a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1 event, got {limit}")
        if seq < max(0, self.last - self._capacity) or seq > self.last:
            return None
        events: list[Event] = []
        for number in range(seq, self.last):
            event = self._ring[number % self._capacity]
            limit -= weight(event)
            if limit < 0 and events:
                break
            events.append(event)
        return events
