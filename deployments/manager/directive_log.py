"""The manager's last orders, for its watchers: evictions, copies between tiers, directives for devices.

A ring: the oldest is dropped. Orders of one kind between the same places that no watcher has seen yet are one entry
with the sum of their segments, for evictions come by the hundred. Noting one costs O(1), with or without watchers. One
thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

MOST_KEPT = 256


@dataclass(slots=True)
class LogEntry:
    """Where it took segments from, and to: a tier and its holder, such as ("cpu", a node's id); None: nowhere."""

    number: int
    kind: str
    source: tuple[str, str] | None
    target: tuple[str, str] | None
    segments: int
    outcome: str
    orders: int = 1


class DirectiveLog:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._orders: deque[LogEntry] = deque(maxlen=MOST_KEPT)
        self._told = 0
        self.last = 0
        """Number of the newest; they are counted from 1 on."""

    def note(
        self,
        kind: str,
        source: tuple[str, str] | None,
        target: tuple[str, str] | None,
        segments: int,
        outcome: str = "done",
    ) -> None:
        """Something was ordered, or has ended: one of `kvmanager.moves.directives`' kinds, or "demote"."""
        newest = self._orders[-1] if self._orders else None
        if newest is not None and newest.number > self._told:
            same = (newest.kind, newest.source, newest.target, newest.outcome) == (kind, source, target, outcome)
            if same:
                newest.segments += segments
                newest.orders += 1
                return
        self.last += 1
        self._orders.append(LogEntry(self.last, kind, source, target, segments, outcome))

    def since(self, seen: int) -> tuple[list[dict[str, Any]], int]:
        """What came after number `seen`, oldest first, and how many of it are no longer there."""
        self._told = self.last
        missing = max(0, min(self.last - seen, self.last))
        kept = min(missing, len(self._orders))
        found = islice(self._orders, len(self._orders) - kept, None)
        return [asdict(order) for order in found], missing - kept
