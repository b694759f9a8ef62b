"""Room that tenants share: one that asks for everything leaves every other its slice.

Invariants, for `capacity` places and n tenants that are known from the start:

* no more than `capacity` places are held, but for those that were taken before there were fewer (`resize`);
* a tenant that holds less than its *slice* (`slice_share` of all places, divided by n) finds room up to it, whatever
  the others hold;
* places outside all slices go to the first that asks, so a tenant that is alone may hold all but the others' slices.

With one tenant there is no slice, and the whole room is its own. O(1) and a number per tenant. Pure; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection

SLICE_SHARE = 0.5
"""Part of the room that is divided into slices: the other half goes where it is asked for."""


class FairShares:
    """See the module's docstring."""

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
