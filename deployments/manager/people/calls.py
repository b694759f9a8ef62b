"""The calls that people's requests become: a part of the manager's actor (`deployments.manager.actor`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.manager.control import Control
from deployments.manager.people.orders import Orders
from deployments.manager.replica_seat import ReplicaSeat, names_by_rank
from deployments.manager.reports import Reports
from deployments.manager.tier_registry import TierRegistry
from kvmanager.loading.load_choice import LoadChoice
from kvmanager.manager import KVManager
from kvmanager.segments.keys import BlockHash, SegmentKey

DESCRIBED_AT_ONCE = 128
"""Nodes of the tree that are put into words before somebody else gets the event loop: a millisecond or two."""


class PeopleCalls:
    """What the actor must have for them. A tenant is named by its tag; None: an administrator asks, for all."""

    _brain: KVManager
    _control: Control
    _loads: LoadChoice
    _orders: Orders
    _replicas: Mapping[str, ReplicaSeat]
    _reports: Reports
    _seats: TierRegistry

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """See `deployments.manager.reports.Reports`, as for those that follow."""
        return self._reports.lookup(hashes)

    async def stats(self) -> dict[str, Any]:
        """The brain's books, and every tier's own count beside them."""
        return await self._reports.stats()

    async def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """What a tenant (by tag) may know of the cache: its own share, and nothing of where it lies."""
        return self._brain.tenant_stats(time.monotonic(), tenant)

    async def parts(self) -> dict[str, Any]:
        """Who is registered, for /health."""
        return self._reports.parts()

    async def trie(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> dict[str, Any] | None:
        """The index as a tree (`kvmanager.views.tree`); None: there is no such `root` for this tenant.

        The search is one bounded piece of work; its nodes are put into words a few at a time, with plans in between.
        """
        tree = self._brain.views.tree(tenant, root, depth, most)
        if tree is None:
            return None
        nodes: list[dict[str, Any]] = []
        for begin in range(0, len(tree.shown), DESCRIBED_AT_ONCE):
            some, replicas = tree.shown[begin : begin + DESCRIBED_AT_ONCE], names_by_rank(self._replicas)
            nodes += self._brain.views.describe(some, replicas, with_tenants=tenant is None)
            await asyncio.sleep(0)
        return {"nodes": nodes, "hidden": tree.hidden_roots}

    async def live(self, seen: int, tenants: Sequence[str]) -> dict[str, Any]:
        """What changes from second to second, for all who watch through one ingress: nobody else is asked for it.

        `seen`: the number of the last order that the ingress has heard of; -1: none. `tenants`: those who watch.
        """
        now = time.monotonic()
        stats = self._brain.stats(now)
        orders, missed = self._seats.news.since(self._seats.news.last if seen < 0 else seen)
        devices = {rank: self._brain.views.device_blocks(name) for rank, name in names_by_rank(self._replicas).items()}
        rates = self._loads.describe()
        return {
            "epoch": self._brain.epoch,
            "last": self._seats.news.last,
            "directives": orders,
            "missed_directives": missed,
            "ranks": {name: seat.rank for name, seat in self._replicas.items()},
            "locations": stats["locations"],
            "nodes": stats["nodes"],
            "ghosts": stats["ghosts"],
            "pins": stats["pins"],
            "device_blocks": devices,
            "prefill_s": rates["prefill_s"],
            "early_prefill_s": rates["early_prefill_s"],
            "tenants": {tenant: self._brain.tenant_stats(now, tenant) for tenant in tenants},
        }

    async def pin(self, hashes: Sequence[BlockHash], ttl_s: float, tenant: str = "") -> dict[str, Any]:
        """See `deployments.manager.control.Control`, as for all that follow."""
        return self._control.pin(hashes, ttl_s, tenant)

    async def unpin(self, hashes: Sequence[BlockHash], tenant: str = "") -> dict[str, Any]:
        """End a tenant's pin."""
        return self._control.unpin(hashes, tenant)

    async def pin_node(self, key: SegmentKey, ttl_s: float | None, whose: str | None) -> dict[str, Any]:
        """See `deployments.manager.people.orders.Orders`, as for those that follow up to `compressed`."""
        return self._orders.pin_node(key, ttl_s, whose, self._control)

    async def would_clear(self, tiers: Sequence[str], tenant: str | None = None) -> dict[str, Any]:
        """What `clear` would take."""
        return self._orders.would_clear(tiers, tenant)

    async def evict_prompt(self, *asked: Any) -> dict[str, Any]:
        """Take what only one prompt needs out of tiers, or say what would go."""
        return await self._orders.evict(*asked)

    async def would_move(self, hashes: Sequence[BlockHash], source: int, target: int) -> dict[str, Any]:
        """What a move between two replicas' devices would do."""
        return self._orders.would_move(hashes, source, target)

    async def hashes_to(self, key: SegmentKey, whose: str | None) -> dict[str, Any]:
        """What a node and all that it follows on is called, for orders that name a prompt by its blocks."""
        return await self._orders.hashes_to(key, whose)

    async def compress(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """Let a prompt be copied to Redis now."""
        return self._orders.compress(hashes)

    async def compressed(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """How far that is."""
        return self._orders.compressed(hashes)

    async def clear(self, tiers: Sequence[str], deadline_s: float, tenant: str | None = None) -> dict[str, Any]:
        """Empty tiers everywhere, or of what one tenant has there."""
        return await self._control.clear(tiers, deadline_s, tenant)

    async def direct(self, kind: str, replica: str | int, *args: Any, **options: Any) -> dict[str, Any]:
        """Order one directive for a replica's device."""
        return await self._control.direct(kind, replica, *args, **options)
