"""Quotas: bytes of a tier that one tenant has for itself, and cannot exceed.

A quota becomes a partition of every location of its tier (`kvmanager.index.stores`). When quotas change, what lies
there moves to its tenant's partition at once, and a partition that holds more than its new budget is *cut down*: its
coldest leaves are ordered evicted, a bounded number with each call of `trim`, so that no request waits for all of them.
What is leased, pinned or only promised stays meanwhile, and the location's own budget holds all the time. One thread.
"""

from collections.abc import Mapping

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Copy
from kvmanager.index.stores import Partition, Store

MOST_TRIMMED = 1000
"""Copies that one call of `trim` evicts: about 5 ms."""

_SETTING = {Tier.CPU: "kv.cpu_tier_bytes", Tier.REDIS: "kv.redis_bytes"}


class Quotas:
    """Divides locations among tenants."""

    def __init__(self, catalog: Catalog, counters: Counters) -> None:
        self._catalog = catalog
        self._counters = counters
        self._excessive: dict[Partition, None] = {}
        """May hold more than their budget; only a change of quotas or budgets puts one here."""

    def set(self, tier: Tier, quotas: Mapping[str, int]) -> None:
        """Replace the quotas of a tier, in bytes by tenant tag. O(copies of the tier).

        Raises ValueError, and changes nothing, for a quota that is negative, has no tenant, or does not fit.
        """
        if tier not in _SETTING:
            raise ValueError(f"quotas are for the tiers cpu and redis; a {tier.value} pool belongs to its replica")
        for tenant, quota in quotas.items():
            if not tenant:
                raise ValueError("a quota needs the tag of a tenant; the empty tag stands for all that are not known")
            if quota < 0:
                raise ValueError(f"the quota of tenant {tenant} must be 0 bytes or more, got {quota}")
        wanted = sum(quotas.values())
        stores = [store for store in self._catalog.stores.values() if store.location.tier is tier]
        for store in stores:
            if store.budget_bytes and wanted > store.budget_bytes:
                place = f"node {store.location.holder}" if tier is Tier.CPU else "Redis"
                raise ValueError(
                    f"the quotas of tier {tier.value} add up to {wanted} bytes, more than the budget "
                    f"{store.budget_bytes} of {place}; lower them or raise {_SETTING[tier]}"
                )
        self._catalog.quotas[tier] = dict(quotas)
        for store in stores:
            store.set_quotas(quotas)
            for copy in reversed(list(store.copies())):  # oldest first, for policies that go by age
                _to_its_partition(copy)
            self.divided(store)

    def divided(self, store: Store) -> None:
        """Note that a location's budget has been divided again."""
        others = [each for each in self._excessive if each.store is not store and not each.store.lost]
        cut_down = [partition for partition in store.partitions() if partition.used_bytes > partition.budget_bytes]
        self._excessive = dict.fromkeys(others + cut_down)

    def trim(self) -> list[Copy]:
        """Take the coldest leaves out of partitions that were cut down; return them, to be evicted.

        At most `MOST_TRIMMED` in a call. O(1) when there are none.
        """
        freed: list[Copy] = []
        for partition in list(self._excessive):
            while partition.used_bytes > partition.budget_bytes and len(freed) < MOST_TRIMMED:
                victim = partition.policy.victim()
                if victim is None:
                    break
                freed += self._catalog.uproot(victim, bytes_lost=False, evicted=True)
            if partition.used_bytes <= partition.budget_bytes:
                del self._excessive[partition]
        self._counters.trimmed_segments += len(freed)
        return freed


def _to_its_partition(copy: Copy) -> None:
    """Let a copy count for its tenant from now on; the new partition's policy knows nothing of its past."""
    target = copy.store.partition_of(copy.node.tenant)
    if target is not copy.partition:
        if copy.evictable:
            copy.partition.policy.shield(copy)
        copy.store.move(copy, target)
        if copy.evictable:
            target.policy.expose(copy)
