"""Room that tenants share, of which one that asks for everything leaves every other its slice; the line in which they
wait.

Pure; not thread-safe.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Generic, TypeVar

from kvmanager.scheduling.virtual_counters import VirtualCounters

SLICE_SHARE = 0.5
"""Part of the room that is divided into slices: the other half goes where it is asked for."""
OVERTAKING = 4.0
"""With `shortest`: how much of its tenant's work may overtake a prompt, in prompts as costly as it is."""
_FEW = 16

T = TypeVar("T")


class FairShares:
    """Room that tenants share.

    Invariants, for `capacity` places and n tenants that are known from the start:

    * no more than `capacity` places are held, but for those that were taken before there were fewer (`resize`);
    * a tenant that holds less than its *slice* (`slice_share` of all places, divided by n) finds room up to it,
      whatever the others hold;
    * places outside all slices go to the first that asks, so a tenant that is alone may hold all but the others'
      slices.

    With one tenant there is no slice, and the whole room is its own. O(1) and a number per tenant.
    """

    def __init__(self, capacity: int, tenants: Collection[str] = (), slice_share: float = SLICE_SHARE) -> None:
        """`tenants`: all that there are; none means that there is one, without a name.

        Raises ValueError where not every tenant can have a place.
        """
        names = set(tenants) or {""}
        if capacity < len(names):
            raise ValueError(f"{len(names)} tenants cannot share {capacity} places; make at least {len(names)}")
        self._slice_share = slice_share
        self._held = dict.fromkeys(names, 0)
        self.held = 0
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Set the number of places, at least one for each tenant; O(tenants).

        What is held beyond them stays held, and until that is given back not every slice is free.
        """
        tenants = len(self._held)
        self.capacity = max(capacity, tenants)
        self.slice = 0 if tenants == 1 else max(1, int(self.capacity * self._slice_share) // tenants)
        self._kept_free = sum(max(0, self.slice - held) for held in self._held.values())
        """Places that tenants do not hold of their slices yet."""

    @property
    def most(self) -> int:
        """Places that a tenant can hold at most, when no other tenant holds any."""
        return self.capacity - self.slice * (len(self._held) - 1)

    def held_by(self, tenant: str) -> int:
        """Places that a tenant holds."""
        return self._held[tenant]

    def room(self, tenant: str) -> int:
        """Places that a tenant could take now."""
        others_slices = self._kept_free - max(0, self.slice - self._held[tenant])
        return self.capacity - self.held - others_slices

    def take(self, tenant: str, places: int) -> bool:
        """Hold `places` more for a tenant; return False, and change nothing, when there is no room."""
        if places > self.room(tenant):
            return False
        self._hold(tenant, places)
        return True

    def give_back(self, tenant: str, places: int) -> None:
        """Free `places` that a tenant holds."""
        self._hold(tenant, -places)

    def _hold(self, tenant: str, places: int) -> None:
        before = self._held[tenant]
        after = self._held[tenant] = before + places
        self.held += places
        self._kept_free += max(0, self.slice - after) - max(0, self.slice - before)


class FairLine(Generic[T]):
    """A line in which tenants take turns: the one served least is next (`kvmanager.scheduling.virtual_counters`).

    Within a tenant the first request to come is first. With `shortest`, short work is: a place in line is worth the
    tenant's counter on joining plus `OVERTAKING` times the prompt's own cost. So no prompt is overtaken for ever: only
    by those that join before its tenant was served that much more.

    A turn takes places of `shares`: as many as the prompt has answers; ended turns are given back there. The head of a
    tenant's line is *waited for* if it does not fit while its tenant holds nothing: other tenants get no more than
    their slices until it fits, so that small requests do not overtake a large one for ever. Where its own tenant's
    turns are in the way, no other tenant waits for it. O(log of the tenant's line) to join, O(tenants in line) for a
    turn.
    """

    def __init__(self, shares: FairShares, counters: VirtualCounters, shortest: bool = False) -> None:
        """`counters` knows every tenant; the caller charges the tenants that have turns there."""
        self._shares = shares
        self._counters = counters
        self._overtaking = OVERTAKING if shortest else 0.0
        self._lines: dict[str, _Line[T]] = {}
        """By tenant; none is empty."""
        self._joined = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def join(self, tenant: str, one: T, places: int, cost: float = 0.0) -> None:
        """Stand in line; `one` must not stand in it yet. What is more than a tenant can hold at all counts as that.

        `cost`: what its work is expected to cost, as the counters count.
        """
        if tenant not in self._lines:
            self._counters.begins_to_wait(tenant, self._lines.keys())
            self._lines[tenant] = _Line()
        self._joined += 1
        worth = self._counters.counter(tenant) + self._overtaking * cost if self._overtaking else 0.0
        self._lines[tenant].join((worth, self._joined), one, min(places, self._shares.most))
        self._waiting += 1

    def leave(self, tenant: str, one: T) -> None:
        """Leave the line. Raises KeyError for one that is not in it."""
        self._lines[tenant].leave(one)
        self._left(tenant)

    def next(self) -> tuple[T, int] | None:
        """Return the one whose turn it is now, with its number of places; None: no turn. Call it until it is None."""
        waited_for = False
        for tenant in self._counters.in_order(self._lines.keys()):
            one, places = self._lines[tenant].first()
            places = min(places, self._shares.most)  # there may be fewer than when it joined
            within_slice = self._shares.held_by(tenant) + places <= self._shares.slice
            if (within_slice or not waited_for) and self._shares.take(tenant, places):
                self._lines[tenant].leave(one)
                self._counters.turn(tenant)
                self._left(tenant)
                return one, places
            waited_for = waited_for or not self._shares.held_by(tenant)
        return None

    def _left(self, tenant: str) -> None:
        self._waiting -= 1
        if not self._lines[tenant]:
            del self._lines[tenant]


class _Line(Generic[T]):
    """The waiting ones of one tenant, and the places that each wants. Those that left stay in the heap for a while."""

    def __init__(self) -> None:
        self._wanted: dict[T, int] = {}
        self._heap: list[tuple[tuple[float, int], T]] = []

    def __len__(self) -> int:
        return len(self._wanted)

    def join(self, place: tuple[float, int], one: T, wanted: int) -> None:
        self._wanted[one] = wanted
        heapq.heappush(self._heap, (place, one))

    def leave(self, one: T) -> None:
        del self._wanted[one]
        if len(self._heap) > 2 * len(self._wanted) + _FEW:  # joining and leaving all the time fills no memory
            self._heap = [entry for entry in self._heap if entry[1] in self._wanted]
            heapq.heapify(self._heap)

    def first(self) -> tuple[T, int]:
        while (one := self._heap[0][1]) not in self._wanted:
            heapq.heappop(self._heap)
        return one, self._wanted[one]
