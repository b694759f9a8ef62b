"""What one location may hold and does hold, in bytes: a budget, divided among partitions.

A tenant with a quota has a *partition* of its own: that much for itself and no more. All other tenants share the
*common* partition, which has what is left. Each partition has an eviction policy of its own, so that no tenant's
segments are ever evicted for another one's.

Quotas that add up to more than a location's budget (a node with less memory than the others) are scaled down in
proportion there, and nothing is left for the rest. One thread.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from kvmanager.locations import Location
from kvmanager.nodes import Copy, CopyState
from kvmanager.policies.base import EvictionPolicy

MakePolicy: TypeAlias = Callable[[Callable[[], int]], EvictionPolicy]
"""From the budget of a partition, which may change, to a policy for it."""


class Partition:
    """A share of a location, with an eviction order of its own."""

    __slots__ = ("budget_bytes", "policy", "store", "tenant", "used_bytes")

    def __init__(self, store: "Store", tenant: str, make_policy: MakePolicy) -> None:
        self.store = store
        self.tenant = tenant
        """Whose it is; empty for the common one."""
        self.budget_bytes = 0
        self.used_bytes = 0
        """Of its copies, in any state but GONE."""
        self.policy = make_policy(lambda: self.budget_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved here without evicting; less than zero in a partition that was cut down.

        Bounded by the location's own room too, which another partition that was cut down may still fill.
        """
        store = self.store
        return min(self.budget_bytes - self.used_bytes, store.budget_bytes - store.used_bytes)


class Share:
    """What one tenant has at a location, with a quota or without: for its own statistics."""

    __slots__ = ("copies", "nbytes", "segments")

    def __init__(self) -> None:
        self.copies = 0
        self.nbytes = 0
        """Of its copies, in any state but GONE."""
        self.segments = 0
        """Of these the RESIDENT ones."""


class Store:
    """The books of one shared location."""

    __slots__ = (
        "_first",
        "_make_policy",
        "budget_bytes",
        "common",
        "location",
        "quotas",
        "reserved_bytes",
        "resident_segments",
        "shares",
        "tenants",
        "used_bytes",
    )

    def __init__(self, location: Location, make_policy: MakePolicy) -> None:
        self.location = location
        self._make_policy = make_policy
        self.common = Partition(self, "", make_policy)
        self.tenants: dict[str, Partition] = {}
        """The partitions of tenants with a quota."""
        self.quotas: Mapping[str, int] = {}
        self.budget_bytes = 0
        self.used_bytes = 0
        """Of all copies, whatever their state: what the tier holds and what it was allowed to fetch."""
        self.reserved_bytes = 0
        """The part of ``used_bytes`` that is only promised."""
        self.resident_segments = 0
        self.shares: dict[str, Share] = {}
        """By tenant tag, of all that have something here, so that nobody has to walk the copies to know."""
        self._first: Copy | None = None
        """Of a list through all copies, so that a location that is lost costs what it held, not the whole index."""

    def partition_of(self, tenant: str) -> Partition:
        """Return where the segments of a tenant count."""
        return self.tenants.get(tenant, self.common)

    def partitions(self) -> Iterator[Partition]:
        """Yield all partitions."""
        yield self.common
        yield from self.tenants.values()

    def copies(self) -> Iterator[Copy]:
        """Yield all copies, newest first. O(copies here); nothing may be added or removed meanwhile."""
        copy = self._first
        while copy is not None:
            yield copy
            copy = copy.later

    def set_budget(self, nbytes: int) -> None:
        """Give the location another budget and divide it anew. O(partitions)."""
        self.budget_bytes = nbytes
        wanted = sum(self.quotas.values())
        left = nbytes
        for tenant, partition in self.tenants.items():
            quota = self.quotas[tenant]
            partition.budget_bytes = quota if wanted <= nbytes else quota * nbytes // wanted
            left -= partition.budget_bytes
        self.common.budget_bytes = left if wanted <= nbytes else 0

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Make and drop partitions and divide the budget among them. O(partitions); what lies here, `move` moves."""
        self.quotas = dict(quotas)
        self.tenants = {
            tenant: self.tenants.get(tenant) or Partition(self, tenant, self._make_policy) for tenant in self.quotas
        }
        self.set_budget(self.budget_bytes)

    def add(self, copy: Copy) -> None:
        """Count a RESERVED copy in."""
        partition = copy.partition
        partition.used_bytes += copy.nbytes
        self.used_bytes += copy.nbytes
        self.reserved_bytes += copy.nbytes
        share = self.shares.setdefault(copy.node.tenant, Share())
        share.copies += 1
        share.nbytes += copy.nbytes
        copy.later = self._first
        if self._first is not None:
            self._first.earlier = copy
        self._first = copy
        partition.policy.stored(copy)

    def commit(self, copy: Copy, nbytes: int) -> None:
        """Count a RESERVED copy as one of ``nbytes`` that the tier has."""
        self.reserved_bytes -= copy.nbytes
        self.used_bytes += nbytes - copy.nbytes
        copy.partition.used_bytes += nbytes - copy.nbytes
        self.shares[copy.node.tenant].nbytes += nbytes - copy.nbytes
        copy.nbytes = nbytes
        copy.state = CopyState.HELD

    def publish(self, copy: Copy) -> None:
        """Count a HELD copy as one that plans may contain."""
        copy.state = CopyState.RESIDENT
        self.resident_segments += 1
        self.shares[copy.node.tenant].segments += 1

    def withdraw(self, copy: Copy) -> None:
        """Count out what a copy was promised or shown as, before it goes or waits for its leases."""
        if copy.state is CopyState.RESERVED:
            self.reserved_bytes -= copy.nbytes
        elif copy.state is CopyState.RESIDENT:
            self.resident_segments -= 1
            self.shares[copy.node.tenant].segments -= 1

    def move(self, copy: Copy, partition: Partition) -> None:
        """Count a copy in another partition from now on; it is exposed in neither."""
        copy.partition.used_bytes -= copy.nbytes
        copy.partition.policy.left(copy, evicted=False)
        copy.partition = partition
        partition.used_bytes += copy.nbytes
        partition.policy.stored(copy)

    def lose(self) -> list[Copy]:
        """Count out all copies, and start with new policies; return the copies. O(copies here)."""
        lost = list(self.copies())
        for copy in lost:
            copy.earlier = copy.later = None
        self._first = None
        self.used_bytes = self.reserved_bytes = self.resident_segments = 0
        self.shares.clear()
        self.common, self.tenants = Partition(self, "", self._make_policy), {}
        self.set_quotas(self.quotas)
        return lost

    def remove(self, copy: Copy, *, evicted: bool) -> None:
        """Count a copy out that has been withdrawn; ``evicted``: to make room."""
        copy.state = CopyState.GONE
        copy.partition.used_bytes -= copy.nbytes
        self.used_bytes -= copy.nbytes
        share = self.shares[copy.node.tenant]
        share.copies -= 1
        share.nbytes -= copy.nbytes
        if not share.copies:
            del self.shares[copy.node.tenant]  # those who have nothing are not remembered
        before, after = copy.earlier, copy.later
        if before is None:
            self._first = after
        else:
            before.later = after
        if after is not None:
            after.earlier = before
        copy.earlier = copy.later = None
        copy.partition.policy.left(copy, evicted=evicted)
