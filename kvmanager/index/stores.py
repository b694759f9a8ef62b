"""What one location may hold and does hold, in bytes: a budget, divided among partitions.

A tenant with a quota has a *partition* of its own: that much for itself and no more. All other tenants share the
*common* partition, which has what is left. Each partition has an eviction policy of its own, so that no tenant's
segments are ever evicted for another one's.

Quotas that add up to more than a location's budget (a node with less memory than the others) are scaled down in
proportion there, and nothing is left for the rest. One thread.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvmanager.index.eviction_policy import EvictionPolicy
from kvmanager.index.locations import Location
from kvmanager.index.nodes import Copy, CopyState
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.spans import NodeKind

MakePolicy: TypeAlias = Callable[[Callable[[], int]], EvictionPolicy]
"""From the budget of a partition, which may change, to a policy for it."""


class Partition:
    """A share of a location, with an eviction order of its own."""

    __slots__ = ("budget_bytes", "policy", "refused_leaf", "store", "tenant", "used_bytes")

    def __init__(self, store: "Store", tenant: str, make_policy: MakePolicy) -> None:
        self.store = store
        self.tenant = tenant
        """Whose it is; empty for the common one."""
        self.budget_bytes = 0
        self.used_bytes = 0
        """Of its copies, in any state but GONE."""
        self.refused_leaf: SegmentKey | None = None
        """The coldest, once Redis had no room for it: it stays the coldest until something happens, counted once."""
        self.policy = make_policy(lambda: self.budget_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved here without evicting; less than zero in a partition that was cut down.

        Bounded by the location's own room too, which another partition that was cut down may still fill.
        """
        store = self.store
        return min(self.budget_bytes - self.used_bytes, store.budget_bytes - store.used_bytes)


@dataclass(slots=True)
class StoredStates:
    """What of some segments are a model's states: the RESIDENT ones, and their bytes."""

    segments: int = 0
    nbytes: int = 0

    def count(self, copy: Copy, by: int) -> None:
        """Count a RESIDENT copy in (1) or out (-1), if it is one of states."""
        if copy.node.kind is NodeKind.STATE:
            self.segments += by
            self.nbytes += by * copy.nbytes


class Walk:
    """The way through the copies of a share that were there when it began: ``copy`` is the next, None at the end."""

    __slots__ = ("copy", "share")

    def __init__(self, share: "Share") -> None:
        self.share = share
        self.copy = share.first
        share.walks.append(self)

    def end(self) -> None:
        """Go no further."""
        self.share.walks.remove(self)


class Share:
    """What one tenant has at a location, with a quota or without.

    To clear it, or to lose the location, *retires* it: its copies leave one after the other (`kvmanager.index.sweeps`),
    and what the tenant stores meanwhile belongs to another share.
    """

    __slots__ = ("copies", "first", "nbytes", "retired", "segments", "states", "tenant", "told", "walks")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.retired = False
        self.told = False
        """Whether mirrors know that all of it is gone."""
        self.first: Copy | None = None
        """Of a list through its copies, the newest first, and so children before parents."""
        self.walks: list[Walk] = []
        """The walks through the list, a few copies at a time."""
        self.copies = 0
        self.nbytes = 0
        """Of its copies, in any state but GONE."""
        self.segments = 0
        """Of these the RESIDENT ones."""
        self.states = StoredStates()

    def link(self, copy: Copy) -> None:
        """Put a copy at the head of the list."""
        copy.later = self.first
        if self.first is not None:
            self.first.earlier = copy
        self.first = copy

    def unlink(self, copy: Copy) -> None:
        """Take a copy out of the list; one that is in none stays as it is."""
        before, after = copy.earlier, copy.later
        for walk in self.walks:
            if walk.copy is copy:
                walk.copy = after
        if before is not None:
            before.later = after
        elif self.first is copy:
            self.first = after
        if after is not None:
            after.earlier = before
        copy.earlier = copy.later = None


class Store:
    """The books of one shared location."""

    __slots__ = (
        "_make_policy",
        "budget_bytes",
        "common",
        "location",
        "lost",
        "quotas",
        "reserved_bytes",
        "resident_segments",
        "retiring",
        "shares",
        "states",
        "tenants",
        "used_bytes",
        "waiting",
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
        self.states = StoredStates()
        self.shares: dict[str, Share] = {}
        """By tag, of the tenants that have something here: their sums need no walk through the copies."""
        self.retiring: list[Share] = []
        """Retired shares with copies that have not left yet."""
        self.waiting: dict[Copy, None] = {}
        """Copies of retired shares that wait for their leases to end."""
        self.lost = False
        """Whether the location is gone with all it held; another store has its name then."""

    def partition_of(self, tenant: str) -> Partition:
        """Return where the segments of a tenant count."""
        return self.tenants.get(tenant, self.common)

    def partitions(self) -> Iterator[Partition]:
        """Yield all partitions."""
        yield self.common
        yield from self.tenants.values()

    def copies(self) -> Iterator[Copy]:
        """Yield all copies, each share's newest first. O(copies); nothing may be added or removed meanwhile."""
        yield from self.waiting
        for share in (*self.retiring, *self.shares.values()):
            copy = share.first
            while copy is not None:
                yield copy
                copy = copy.later

    def share_of(self, tenant: str) -> Share:
        """Return what a tenant has here; for a tenant with nothing a new share that is not remembered yet."""
        return self.shares.get(tenant) or Share(tenant)

    def set_budget(self, nbytes: int) -> None:
        """Give the location another budget and divide it again. O(partitions)."""
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
        share = self.shares[copy.node.tenant] = copy.share
        share.copies += 1
        share.nbytes += copy.nbytes
        share.link(copy)
        partition.policy.stored(copy)

    def commit(self, copy: Copy, nbytes: int) -> None:
        """Count a RESERVED copy as one of ``nbytes`` that the tier has."""
        self.reserved_bytes -= copy.nbytes
        self.used_bytes += nbytes - copy.nbytes
        copy.partition.used_bytes += nbytes - copy.nbytes
        copy.share.nbytes += nbytes - copy.nbytes
        copy.nbytes = nbytes
        copy.state = CopyState.HELD

    def retire(self, share: Share, *, told: bool) -> None:
        """Hide what a tenant has here from now on. ``told``: mirrors know it."""
        share.retired, share.told = True, told
        del self.shares[share.tenant]
        self.retiring.append(share)

    def publish(self, copy: Copy) -> None:
        """Count a HELD copy as one that plans may contain."""
        copy.state = CopyState.RESIDENT
        self.resident_segments += 1
        copy.share.segments += 1
        for states in (self.states, copy.share.states):
            states.count(copy, 1)

    def withdraw(self, copy: Copy) -> None:
        """Count out what a copy was promised or shown as, before it goes or waits for its leases."""
        if copy.state is CopyState.RESERVED:
            self.reserved_bytes -= copy.nbytes
        elif copy.state is CopyState.RESIDENT:
            self.resident_segments -= 1
            copy.share.segments -= 1
            for states in (self.states, copy.share.states):
                states.count(copy, -1)

    def move(self, copy: Copy, partition: Partition) -> None:
        """Count a copy in another partition from now on; it is exposed in neither."""
        copy.partition.used_bytes -= copy.nbytes
        copy.partition.policy.left(copy, evicted=False)
        copy.partition = partition
        partition.used_bytes += copy.nbytes
        partition.policy.stored(copy)

    def wait_for_leases(self, copy: Copy) -> None:
        """Keep a DOOMED copy of a retired share where a loss of the location finds it."""
        copy.share.unlink(copy)
        self.waiting[copy] = None

    def remove(self, copy: Copy, *, evicted: bool) -> None:
        """Count a copy out that has been withdrawn; ``evicted``: to make room."""
        copy.state = CopyState.GONE
        copy.partition.used_bytes -= copy.nbytes
        self.used_bytes -= copy.nbytes
        self.waiting.pop(copy, None)
        share = copy.share
        share.copies -= 1
        share.nbytes -= copy.nbytes
        share.unlink(copy)
        if not share.copies and self.shares.get(share.tenant) is share:
            del self.shares[share.tenant]  # tenants that have nothing are not remembered
        copy.partition.policy.left(copy, evicted=evicted)
