"""Keeps a router's mirror of the index up to date: one long poll to the manager, no call per request."""

from __future__ import annotations

import asyncio
import logging

from deployments.manager_client import ManagerClient, ManagerUnavailableError
from kvmanager.mirror import PlacementMirror

logger = logging.getLogger(__name__)

POLL_WAIT_S = 5.0
ANSWER_S = 5.0
RETRY_S = 0.5


class PlacementFeed:
    """`mirror` and `ranks` (replica id to its number) as of the last answer. One per router, on its event loop."""

    def __init__(self, app_name: str, blocks_per_segment: int) -> None:
        self.mirror = PlacementMirror(blocks_per_segment)
        self.ranks: dict[str, int] = {}
        self.resyncs = 0
        self._manager = ManagerClient(app_name)
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            try:
                deltas, ranks = await self._manager.ask(
                    "deltas", self.mirror.seq, POLL_WAIT_S, timeout_s=POLL_WAIT_S + ANSWER_S
                )
                self.ranks = ranks
                if not self.mirror.apply(deltas):
                    self.resyncs += 1
                    logger.info("the router's mirror asks for a snapshot")
            except ManagerUnavailableError:
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.exception("the router's mirror could not follow the KV manager")
                await asyncio.sleep(RETRY_S)
