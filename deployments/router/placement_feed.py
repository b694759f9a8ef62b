"""Keeps a router's mirror of the index up to date: one long poll to the manager, no call per request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from deployments.protocol.manager_client import MANAGER_ANSWER_S, ManagerClient, ManagerUnavailableError
from deployments.protocol.memory import GcFreeze
from deployments.router.metrics import router_metrics
from kvmanager.index.deltas import Deltas
from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import ALL_REPLICAS
from kvmanager.moves.directives import Move
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.routing.spreading import Spread

logger = logging.getLogger(__name__)

POLL_WAIT_S = 5.0
PAUSE_S = 0.02
"""Between an answer and the next question: changes come in bursts, and each answer costs the manager more than what is
in it. A change that follows no other is told at once."""
RETRY_S = 0.5
MOVE_DEADLINE_S = 10.0
"""A prefix that takes longer to move has been computed by then."""


class PlacementFeed:
    """`mirror`, `ranks` (replica id to its number), `credits` and `roles` as of the last answer.

    One per router, on its loop.
    """

    def __init__(self, app_name: str, blocks_per_segment: int) -> None:
        self.mirror = PlacementMirror(blocks_per_segment)
        self.ranks: dict[str, int] = {}
        self.credits: dict[str, dict[Tier, float]] = {}
        """By replica id, and under `ALL_REPLICAS`; only what has been measured."""
        self.roles: dict[str, str] = {}
        """`kvmanager.routing.roles.Role` by replica id; empty without roles. The last ones known, without a manager."""
        self._metrics = router_metrics()
        self._garbage = GcFreeze()
        self._manager = ManagerClient(app_name)
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def order(self, spread: Spread) -> None:
        """Ask the manager to bring a hot prefix to one more replica. Does not wait, and needs no answer."""
        self._metrics.moves.inc()
        try:
            self._manager.tell("api", "move", Move(spread.source, spread.target, list(spread.hashes)), MOVE_DEADLINE_S)
        except ManagerUnavailableError:
            self._metrics.lost_moves.inc()
        except Exception:
            self._metrics.lost_moves.inc()
            logger.exception("a hot prefix could not be spread")

    def replicas_drain(self, gone: Sequence[str], running: Sequence[str]) -> None:
        """Tell the manager the replicas that Serve drains and those that run on. An absent manager need not know."""
        with contextlib.suppress(ManagerUnavailableError):
            self._manager.tell("api", "drain", gone, running)

    def hear(
        self,
        deltas: Deltas,
        ranks: Mapping[str, int],
        credits: Mapping[str, Mapping[str, float]] | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        """Take in an answer of the manager; one that has measured nothing yet sends no credits.

        ``credits`` are by replica id or `ALL_REPLICAS`, and then by tier.
        """
        self.ranks, self.roles = dict(ranks), dict(roles or {})
        self.credits = {name: _of_tiers(shares) for name, shares in (credits or {}).items()}
        for tier, share in self.credits.get(ALL_REPLICAS, {}).items():
            self._metrics.credit.labels(tier.value).set(share)
        if not self.mirror.apply(deltas):
            self._metrics.resyncs.inc()
            logger.info("the router's mirror asks for a snapshot")
            return
        self._garbage.set_aside(self.mirror.segments)
        self._metrics.index_events.inc(len(deltas.events) + (len(deltas.part.events) if deltas.part else 0))
        if not deltas.more:
            self._metrics.mirror_is_whole()

    async def _follow(self) -> None:
        while True:
            try:
                answer = await self._manager.ask(
                    "deltas", self.mirror.position, POLL_WAIT_S, timeout_s=POLL_WAIT_S + MANAGER_ANSWER_S
                )
                self.hear(*answer)
                if not answer[0].more:
                    await asyncio.sleep(PAUSE_S)
            except ManagerUnavailableError:
                self._metrics.failed_polls.inc()
                await asyncio.sleep(RETRY_S)
            except Exception:
                self._metrics.failed_polls.inc()
                logger.exception("the router's mirror could not follow the KV manager")
                await asyncio.sleep(RETRY_S)


def _of_tiers(shares: Mapping[str, float]) -> dict[Tier, float]:
    known = {tier.value: tier for tier in Tier}
    return {known[name]: min(1.0, max(0.0, share)) for name, share in shares.items() if name in known}
