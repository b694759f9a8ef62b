"""A line in which tenants take turns: within a tenant who came first is first, among tenants each gets one in a round.

A turn takes places (`app.gate.fair_shares`): as many as the prompt has answers. Who stands at the head of its tenant's
line and does not fit while its tenant holds nothing is *waited for*: others get no more than their slices until it
fits, so that a large request is not overtaken for ever by small ones. Where its own tenant's turns are in the way,
nobody waits for it. O(1) to join and leave, O(tenants in line) for a turn. Pure; not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from app.gate.fair_shares import FairShares

T = TypeVar("T")


class FairLine(Generic[T]):
    """See the module's docstring. `shares` counts the turns that have begun; who ends one gives it back there."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._lines: OrderedDict[str, OrderedDict[T, int]] = OrderedDict()
        """By tenant, who waits and how many places it wants; the tenant whose turn is next first. None is empty."""
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def join(self, tenant: str, one: T, places: int) -> None:
        """Stand in line; `one` must not stand in it yet. What is more than a tenant can hold at all counts as that."""
        self._lines.setdefault(tenant, OrderedDict())[one] = min(places, self._shares.most)
        self._waiting += 1

    def leave(self, tenant: str, one: T) -> None:
        """Stand in line no longer. Raises KeyError for who does not."""
        del self._lines[tenant][one]
        self._left(tenant)

    def next(self) -> tuple[T, int] | None:
        """Whose turn it is now, and the places that it has got; None: nobody's. To be asked until it is nobody's."""
        waited_for = False
        for tenant, line in self._lines.items():
            one, places = next(iter(line.items()))
            places = min(places, self._shares.most)  # there may be fewer than when it joined
            within_slice = self._shares.held_by(tenant) + places <= self._shares.slice
            if (within_slice or not waited_for) and self._shares.take(tenant, places):
                del line[one]
                self._lines.move_to_end(tenant)
                self._left(tenant)
                return one, places
            waited_for = waited_for or not self._shares.held_by(tenant)
        return None

    def _left(self, tenant: str) -> None:
        self._waiting -= 1
        if not self._lines[tenant]:
            del self._lines[tenant]
