"""The report of GET /health: the replicas that this process knows to live, and the manager's last word on the parts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from app.backend.manager_control import PARTS_ANSWER_S
from app.backend.protocols import HealthReport
from configs.settings import Settings
from deployments.protocol.manager_client import DIRECTIVES_WAIT_S, ManagerClient, ManagerUnavailableError
from kvmanager.scaling.book import WantedReplicas
from kvmanager.scheduling.rebalancing import KVReport

logger = logging.getLogger(__name__)

PARTS_EVERY_S = 1.0
SILENT_S = 3 * DIRECTIVES_WAIT_S
"""A replica reports at least every `DIRECTIVES_WAIT_S`. After this time /health calls it missing; where others report,
it is the last that is sent requests, and its silent streams go on elsewhere."""


class PartsWatch:
    """Asks the manager every second which parts are there, so that neither a request nor a health probe has to.

    It does not decide whether requests can be served: a manager that has just started knows no replica.
    """

    def __init__(self, manager: ManagerClient) -> None:
        self.ranks: Mapping[str, int] = {}
        """By the replica's unique name, as last heard: the manager may be gone while replicas are not."""
        self.silence_s: Mapping[str, float] = {}
        """By name, the seconds that a replica had not reported for."""
        self.roles: Mapping[str, str] = {}
        """By name, as last heard; empty without roles."""
        self.kv: Mapping[str, KVReport] = {}
        """By name, what a replica last said of its device pool."""
        self.apart: Mapping[int, str] = {}
        """By rank, why a replica shares no KV though others do."""
        self.cpu_tiers: int | None = None
        self.redis: Mapping[str, Any] | None = None
        self.scaling: Mapping[str, Any] = {}
        """What was decided last of the number of replicas (`kvmanager.scaling.book`); empty: nothing, or not known."""
        self.error = "not asked yet"
        """Why nothing is known of the cache's parts; empty while the manager answers."""
        self._manager = manager
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def hear(self, parts: Mapping[str, Any]) -> None:
        """Take in what the manager said."""
        replicas: Mapping[str, tuple[int, float]] = parts["replicas"]
        if replicas:  # a manager that has just started knows no replica yet
            self.ranks = {name: rank for name, (rank, _) in replicas.items()}
        self.silence_s = {name: silence_s for name, (_, silence_s) in replicas.items()}
        self.roles, self.kv = parts.get("roles") or {}, parts.get("kv") or {}
        self.apart = parts.get("apart") or {}
        self.cpu_tiers, self.redis, self.error = len(parts["cpu_tiers"]), parts.get("redis"), ""
        self.scaling = parts.get("scaling") or {}

    def _forget(self, why: str) -> None:
        self.silence_s, self.cpu_tiers, self.redis, self.error = {}, None, None, why
        self.scaling, self.kv, self.apart = {}, {}, {}

    async def _watch(self) -> None:
        failed = False
        while True:
            try:
                self.hear(await self._manager.ask("api", "parts", timeout_s=PARTS_ANSWER_S))
            except ManagerUnavailableError as error:
                self._forget(str(error))
            except Exception as error:  # else what was said before would be shown for ever
                if not failed:
                    logger.exception("what the KV manager says of its parts cannot be read (logged once)")
                failed = True
                self._forget(f"its answer cannot be read: {error!r}")
            await asyncio.sleep(PARTS_EVERY_S)


def health_probe(
    parts: PartsWatch,
    living: Callable[[], frozenset[str] | None],
    settings: Settings,
    listed: Callable[[], int] = lambda: 0,
) -> Callable[[], Awaitable[HealthReport]]:
    """Return the probe of GET /health, which answers from what is known here, without a call.

    `living`: names of the replicas that can be sent to now; None: Serve has not told yet, and a request would wait.
    `listed`: how many Serve runs, as it said last.
    """
    wanted_replicas = WantedReplicas(settings.min_replicas)

    async def health() -> HealthReport:
        alive = living()
        if alive is None:
            untold = {"state": "Serve has not told yet who runs"}
            return HealthReport(False, {"kv_manager": {"state": parts.error or "ok"}, "replicas": untold})
        # The number of a replica that the manager has not heard of is unknown, so it takes no pinned request yet. A
        # manager that has heard of no replica has just started, or is gone.
        unheard = math.inf if parts.silence_s else 0.0
        reporting = {name for name in alive if parts.silence_s.get(name, unheard) < SILENT_S}
        wanted = settings.min_replicas
        if settings.scales:
            wanted = wanted_replicas.now(time.monotonic(), parts.scaling.get("target"), len(reporting), listed())
        missing = wanted - len(reporting)
        report: dict[str, Mapping[str, Any]] = {
            "kv_manager": {"state": parts.error or "ok"},
            "replicas": {
                "state": "ok" if missing <= 0 else f"{missing} of {wanted} missing",
                "running": sorted(parts.ranks[name] for name in reporting if name in parts.ranks),
                **({"wanted": parts.scaling["target"]} if "target" in parts.scaling else {}),
            },
        }
        if parts.apart:
            why = "; ".join(f"off at replica {rank}: {why}" for rank, why in sorted(parts.apart.items()))
            report["kv_sharing"] = {"state": why}
        if not parts.error:
            tier_wanted = settings.kv.enabled and settings.kv.cpu_tier_bytes > 0
            state = "ok" if parts.cpu_tiers or not tier_wanted else "missing"
            report["cpu_tier"] = {"state": state, "running": parts.cpu_tiers}
            if settings.kv.enabled and settings.kv.redis_url is not None and parts.redis is not None:
                report["redis"] = parts.redis
        return HealthReport(bool(alive), report)

    return health
