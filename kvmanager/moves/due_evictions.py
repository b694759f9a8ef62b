"""Evictions that are due: copies that the index has forgotten, but that no directive has named yet.

A lease ends, a reservation times out, a quota shrinks: what becomes of it is ordered by the next method of the manager
that returns directives. Until then the bytes are still there, so a tier carries out the evictions that are due at it
before it stores. One thread.
"""

from collections.abc import Collection, Iterable

from kvmanager.index.counters import Counters
from kvmanager.index.locations import Location
from kvmanager.index.nodes import Copy
from kvmanager.moves.directives import Evict
from kvmanager.segments.keys import SegmentKey


def evictions(copies: Iterable[Copy]) -> tuple[Evict, ...]:
    """Return the orders that free copies the catalogue has forgotten, one per location, keys in the given order."""
    keys: dict[Location, dict[SegmentKey, None]] = {}
    for copy in copies:
        keys.setdefault(copy.store.location, {})[copy.node.key] = None
    return tuple(Evict(location, tuple(gone)) for location, gone in keys.items())


class DueEvictions:
    """See the module."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._copies: list[Copy] = []

    def add(self, copies: Iterable[Copy]) -> None:
        """Remember forgotten copies."""
        self._copies += copies

    def drop(self, location: Location, keys: Collection[SegmentKey] | None = None) -> None:
        """Note that nothing is due for ``keys`` at a location, or for all of it: it keeps them, or has lost them."""
        self._copies = [
            copy
            for copy in self._copies
            if copy.store.location != location or (keys is not None and copy.node.key not in keys)
        ]

    def keys(self, location: Location) -> set[SegmentKey]:
        """Return what is due at a location."""
        return {copy.node.key for copy in self._copies if copy.store.location == location}

    def order(self, location: Location | None = None) -> tuple[Evict, ...]:
        """Name all that is due, or what is due at one location, children before parents."""
        due = [copy for copy in self._copies if location in (None, copy.store.location)]
        self._copies = [] if location is None else [copy for copy in self._copies if copy.store.location != location]
        # Losses of different days meet here: a parent's demotion may have ended before its child's.
        due.sort(key=lambda copy: copy.node.start_block, reverse=True)
        self._counters.evicted_segments += len(due)
        return evictions(due)
