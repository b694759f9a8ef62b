"""Loads that were planned and have not ended: how many bytes are on their way from where.

A load is here from its plan to its lease's release; one whose release was lost, until its deadline, which is the later
the more bytes it has.

All bytes are as they are stored at the tier; a coded segment is larger in memory.

A replica loads a segment once for all requests that want it there, so its bytes are on their way once (`brings`).

Reports of finished loads name no plan. They come before the release that ends the load here, so each is taken for the
load of that replica that comes nearest to it in size, which says what was ahead of it. One thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from kvmanager.index.locations import Location, Tier
from kvmanager.segments.keys import SegmentKey


@dataclass(frozen=True, slots=True)
class _Load:
    replica: str
    sizes: Mapping[Location, int]
    ahead: Mapping[Tier, float]
    keys: Collection[SegmentKey]


class LoadsUnderWay:
    """See the module's docstring. Times are seconds on any clock that does not jump."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._deadlines: list[tuple[float, int]] = []
        """A heap of when loads end at the latest, by their leases; of one that has ended, until then."""
        self._nbytes: dict[Location, int] = {}
        self._brings: dict[str, dict[SegmentKey, int]] = {}
        """By replica, the lease of the load that brings a segment."""

    def begin(
        self,
        lease_id: int,
        replica: str,
        sizes: Mapping[Location, int],
        ahead: Mapping[Tier, float],
        deadline: float,
        keys: Collection[SegmentKey] = (),
    ) -> None:
        """Note a planned load: its bytes by location, what was on its way from each tier before it, its segments."""
        self._loads[lease_id] = _Load(replica, sizes, ahead, keys)
        heappush(self._deadlines, (deadline, lease_id))
        self._brings.setdefault(replica, {}).update(dict.fromkeys(keys, lease_id))
        for location, size in sizes.items():
            self._nbytes[location] = self._nbytes.get(location, 0) + size

    def end(self, lease_id: int) -> None:
        """Note that a load has ended; one that is not here is no error."""
        load = self._loads.pop(lease_id, None)
        if load is None:
            return
        for location, size in load.sizes.items():
            left = self._nbytes.pop(location, 0) - size
            if left:
                self._nbytes[location] = left
        brings = self._brings.get(load.replica, {})
        for key in load.keys:
            if brings.get(key) == lease_id:
                del brings[key]
        if not brings:
            self._brings.pop(load.replica, None)

    def expire(self, now: float) -> None:
        """End the loads whose deadline has passed. O(log loads) for each."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self.end(heappop(self._deadlines)[1])

    def forget_replica(self, replica: str) -> None:
        """End the loads of a replica that is gone. O(loads)."""
        for lease_id in [lease_id for lease_id, load in self._loads.items() if load.replica == replica]:
            self.end(lease_id)

    def brings(self, replica: str, key: SegmentKey) -> bool:
        """Return whether a load is bringing a segment to a replica already."""
        return key in self._brings.get(replica, ())

    def nbytes(self, location: Location) -> int:
        """Return the bytes on their way from a location, as they are stored there."""
        return self._nbytes.get(location, 0)

    def count(self, tier: Tier) -> int:
        """Return how many loads are under way from a tier. O(loads)."""
        return sum(any(location.tier is tier for location in load.sizes) for load in self._loads.values())

    def ahead_of(self, replica: str, tier: Tier, nbytes: int) -> float:
        """Return what was on its way from a tier before the load of which ``nbytes`` are reported; 0 without one.

        O(loads).
        """
        nearest: tuple[int, float] | None = None
        for load in self._loads.values():
            own = sum(size for location, size in load.sizes.items() if location.tier is tier)
            if load.replica == replica and own and (nearest is None or abs(own - nbytes) < nearest[0]):
                nearest = abs(own - nbytes), load.ahead.get(tier, 0.0)
        return nearest[1] if nearest is not None else 0.0
