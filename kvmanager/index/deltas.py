"""Deltas: every change of placement as a numbered event, kept within bounds.

A mirror (`kvmanager.routing.mirror`) asks for what came after the last number it knows. What is no longer kept
cannot be told piecemeal: then the answer begins a snapshot, the whole placement as the events that would build it, in
parts.
"""

from collections import deque
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
MOST_WEIGHT = 1 << 18
"""Segments and blocks of all events that are kept, some 20 MB: of long prompts an event has hundreds of blocks.

A mirror that is further behind takes a snapshot.
"""


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
    """The last events, numbered from 1: ``capacity`` at most, of `MOST_WEIGHT` segments and blocks. One thread."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the log of deltas needs room for at least one event, got {capacity}")
        self._capacity = capacity
        self._events: deque[Event] = deque()
        self._weight = 0
        self.last = 0
        """Number of the newest event."""

    def append(self, event: Event) -> None:
        """Number and keep an event."""
        self._events.append(event)
        self._weight += weight(event)
        self.last += 1
        while len(self._events) > self._capacity or (self._weight > MOST_WEIGHT and len(self._events) > 1):
            self._weight -= weight(self._events.popleft())

    def since(self, seq: int, limit: int) -> list[Event] | None:
        """Return events after number ``seq``, about ``limit`` segments and blocks; None if some are lost.

        O(limit). Raises ValueError for a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1 event, got {limit}")
        first = self.last - len(self._events)
        if not first <= seq <= self.last:
            return None
        events: list[Event] = []
        for place in range(seq - first, len(self._events)):
            event = self._events[place]
            limit -= weight(event)
            if limit < 0 and events:
                break
            events.append(event)
        return events
