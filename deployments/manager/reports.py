"""The manager's reports to people and routers: where a prompt lies, the books, registered parts, changes.

On the manager's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.index_watch import IndexWatch
from deployments.manager.replica_state import ReplicaState, names_by_rank
from deployments.manager.tier_registry import TierRegistry
from kvmanager.index.deltas import NOTHING_SEEN, Deltas, Position
from kvmanager.loading.load_choice import LoadChoice
from kvmanager.loading.load_rates import ALL_REPLICAS
from kvmanager.manager import KVManager
from kvmanager.routing.roles import RoleBook
from kvmanager.scaling.book import ScalingBook
from kvmanager.segments.keys import BlockHash

MOST_DELTAS = 4096
"""Segments and blocks in the events of one answer to a router; the rest follows in the next."""

DESCRIBED_AT_ONCE = 128
"""Nodes of the tree that are put into words before other calls get the event loop: a millisecond or two."""

TURN_S = 0.05
"""How often it is looked whether a waiting router may begin a snapshot: some ten parts of another one's."""


class RouterNews(NamedTuple):
    """One answer to a router's long poll.

    `ranks` and `roles` are by replica's name, `credits` by that or `ALL_REPLICAS`, and then by tier.
    """

    deltas: Deltas
    ranks: dict[str, int]
    credits: dict[str, dict[str, float]]
    roles: dict[str, str]


class Reports:
    """See the module's docstring. `replicas` are the registered ones, `ended` counts those that ended, by why."""

    def __init__(
        self,
        brain: KVManager,
        replicas: Mapping[str, ReplicaState],
        ended: Mapping[str, int],
        roles: RoleBook,
        loads: LoadChoice,
        directives: DirectiveSender,
        tiers: TierRegistry,
        watch: IndexWatch,
    ) -> None:
        self._brain = brain
        self._replicas = replicas
        self._ended = ended
        self._loads = loads
        self._directives = directives
        self._tiers = tiers
        self.scaling = ScalingBook()
        self._roles = roles
        self._watch = watch

    def lookup(self, hashes: Sequence[BlockHash], most_blocks: int | None = None) -> dict[str, Any]:
        """Where the leading blocks of a prompt lie (`KVManager.lookup`). Replicas are named by rank."""
        found = self._brain.lookup(hashes, most_blocks)
        found["device"] = {
            str(rank): found["device"][replica]
            for rank, replica in sorted(names_by_rank(self._replicas).items())
            if replica in found["device"]
        }
        return found

    def stored_blocks(self, sequences: Sequence[Sequence[BlockHash]]) -> list[int]:
        """Return how many leading blocks of each sequence the shared tiers have. No lease, and no use is counted."""
        return self._brain.stored_blocks(sequences)

    def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """Return what a tenant (by tag) may know of the cache: its own share, and nothing of where it lies."""
        return self._brain.tenant_stats(time.monotonic(), tenant)

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

    def live(self, seen: int, tenants: Sequence[str]) -> dict[str, Any]:
        """Return what changes from second to second, for all watchers of one ingress: no tier is asked for it.

        `seen`: the number of the last order that the ingress has heard of; -1: none. `tenants`: the watching ones.
        """
        now = time.monotonic()
        stats = self._brain.stats(now)
        log = self._tiers.log
        orders, missed = log.since(log.last if seen < 0 else seen)
        devices = {rank: self._brain.views.device_blocks(name) for rank, name in names_by_rank(self._replicas).items()}
        rates = self._loads.describe()
        return {
            "epoch": self._brain.epoch,
            "last": log.last,
            "directives": orders,
            "missed_directives": missed,
            "ranks": {name: state.rank for name, state in self._replicas.items()},
            "locations": stats["locations"],
            "nodes": stats["nodes"],
            "ghosts": stats["ghosts"],
            "pins": stats["pins"],
            "device_blocks": devices,
            "prefill_s": rates["prefill_s"],
            "early_prefill_s": rates["early_prefill_s"],
            "tenants": {tenant: self._brain.tenant_stats(now, tenant) for tenant in tenants},
        }

    def scaling_decided(self, *decided: Any) -> None:
        """Note what Serve's policy has decided (`kvmanager.scaling.book.ScalingBook.hear`)."""
        self.scaling.hear(time.monotonic(), *decided)

    async def stats(self) -> dict[str, Any]:
        """Return the brain's books, and every tier's own count."""
        stats = self._brain.stats(time.monotonic())
        stats["replicas"] = {str(rank): name for rank, name in sorted(names_by_rank(self._replicas).items())}
        roles = self._roles.roles
        stats["roles"] = {rank: roles[name] for rank, name in stats["replicas"].items() if name in roles}
        stats["replicas_ended"] = dict(self._ended)
        stats["credits"] = self._loads.credits(time.monotonic()).get(ALL_REPLICAS, {})
        stats["load_or_recompute"] = self._loads.describe()
        stats["directives"] = self._directives.report()
        stats["scaling"] = self.scaling.report(time.monotonic())
        stats["cpu_tiers"], stats["redis"] = await self._tiers.stats()
        return stats

    def parts(self) -> dict[str, Any]:
        """Return the registered parts for /health: each replica's rank and seconds since its last report, and tiers."""
        now = time.monotonic()
        return {
            "replicas": {name: (state.rank, now - state.last_seen) for name, state in self._replicas.items()},
            "roles": self._roles.roles,
            "kv": {name: state.kv for name, state in self._replicas.items() if state.kv is not None},
            "apart": {state.rank: state.apart for state in self._replicas.values() if state.apart},
            "cpu_tiers": sorted(self._tiers.cpu),
            "redis": self._tiers.redis_report(),
            "scaling": self.scaling.report(now),
        }

    async def router_news(self, seen: Position, wait_s: float) -> RouterNews:
        """What comes after `seen`, as soon as there is anything, at the latest after `wait_s`."""
        found = self._brain.deltas_since(seen, MOST_DELTAS)
        until = time.monotonic() + wait_s
        while found.waits and time.monotonic() < until:
            await asyncio.sleep(TURN_S)
            found = self._brain.deltas_since(NOTHING_SEEN, MOST_DELTAS)
        if not found.events and found.part is None and not found.waits:
            await self._watch.changed(wait_s)
            found = self._brain.deltas_since(seen, MOST_DELTAS)
        ranks = {replica: state.rank for replica, state in self._replicas.items()}
        return RouterNews(found, ranks, self._loads.credits(time.monotonic()), self._roles.roles)
