"""An engine with all that a replica has below it: manager, CPU tier and, if wanted, Redis, each a Ray actor.

Nothing here computes while something else is measured: arms take turns, and each waits until the one before is at rest.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from configs.settings import Settings
from deployments.manager.config import manager_config
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.kv_port import OfferedBlocks, SaveGrant
from deployments.protocol.manager_client import ManagerClient
from deployments.redis_tier.server import EmbeddedRedis
from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.extensions.sparse.retained_prefixes import SPARSE
from load_tests.harness.disturbed_redis import disturbed
from load_tests.harness.emulated_link import NO_LINK, EmulatedLink
from load_tests.harness.patience import PATIENCE_S, until
from load_tests.harness.planned_engine import PlannedEngine
from load_tests.harness.tiers import Tiers, redis_config

REPLICA = "replica"


class GatedPort:
    """A replica's port: while it does not grant, every save ends as if the manager had wanted nothing.

    Saves wait for `begin`: so a whole prompt's way out can be timed by itself.
    """

    def __init__(self, port: ClusterPort) -> None:
        self._port = port
        self.grants = True
        self.begin = threading.Event()
        self.begin.set()

    def offer(self, offered: OfferedBlocks, segment_bytes: Sequence[int]) -> SaveGrant | None:
        """See `KVPort`."""
        self.begin.wait(PATIENCE_S)
        return self._port.offer(offered, segment_bytes) if self.grants else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


class PortSource:
    """What a replica's room is for its plans, of an engine that does not blend: a `PlanSource` over the port alone."""

    def __init__(self, port: ClusterPort, sparse_budgets: Budgets | None) -> None:
        self._port = port
        self.terms = {SPARSE: sparse_budgets}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


class TieredEngine(PlannedEngine):
    """Use on one event loop, within `tiers.running`."""

    def __init__(
        self, app: str, settings: Settings, server: EmbeddedRedis | None, link: EmulatedLink = NO_LINK
    ) -> None:
        """Without `server` there is no Redis tier; `link` lies between the tiers and Redis."""
        kv = settings.kv
        redis = disturbed(redis_config(app, server, settings), link) if server else None
        workers = kv.prefetch_workers if server else 0
        self.tiers = Tiers(app, manager_config(settings), int(kv.cpu_tier_bytes), workers, redis)
        self._cluster = ClusterPort(app, REPLICA, self.tiers.node, kv, ManagerClient(app))
        super().__init__(settings, GatedPort(self._cluster))
        self._source = PortSource(self._cluster, self.reuse.terms.get("sparse"))
        self.plan_by(self._source)
        self.tiers.wait_until_ready(self.keep_alive)

    def plan_sparse(self, budgets: Budgets | None) -> None:
        """From now on plan for a replica with these budgets; None: dense KV only."""
        self._source.terms[SPARSE] = budgets

    def keep_alive(self) -> list[str]:
        """See `Tiers.keep_alive`."""
        return self.tiers.keep_alive(self.fingerprint, REPLICA)

    async def rest(self) -> None:
        """Wait until nothing is saved, copied or on its way any more."""
        await asyncio.to_thread(self.wait_for_saves)
        await asyncio.to_thread(self.port.flush)
        await asyncio.to_thread(until, self._at_rest, "nothing is on its way", PATIENCE_S)

    async def empty_device(self) -> None:
        """The device forgets all, and the manager hears of it."""
        await self.rest()
        await super().empty_device()
        await asyncio.to_thread(self.port.flush)

    async def forget(self, *tiers: str) -> None:
        """So do these tiers; default: all of them."""
        await self.empty_device()
        self.tiers.ask("api", "clear", list(tiers or (("cpu", "redis") if self.tiers.redis else ("cpu",))), PATIENCE_S)

    @property
    def segments_saved(self) -> int:
        """Since the start."""
        return self.reuse.transfer.counters.segments_saved

    def close(self) -> None:
        """End the engine and the parts."""
        super().close()
        self._cluster.close()
        self.tiers.close()

    def _at_rest(self) -> bool:
        self.keep_alive()
        return self.tiers.at_rest()
