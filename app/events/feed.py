"""Asks the manager once a second, for all that watch through this ingress, and tells them; or that the ingress ends.

It makes one call a second while any client watches, however many there are, and none while no client does. A manager
that does not answer is *away*: the ingress's own counts go on, and every second says so. The sizes of the replicas'
device pools are read from their metrics now and then, for administrators. One event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from app.backend.manager_control import ManagerControl
from app.events.decisions import Decisions
from app.events.figures import LivePrompt, ManagerSnapshot, for_admin, for_tenant
from app.events.watchers import Watcher

logger = logging.getLogger(__name__)

EVERY_S = 1.0
ASK_S = 0.9
"""A manager that has not answered by then is away, for this second."""
SIZES_EVERY_S = 10.0
_POOL = "crosskv_device_blocks"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the ingress's own figures come from. `tag`: a tenant's name in the index."""

    tag: Callable[[str], str]
    live: Callable[[], Iterable[LivePrompt]]
    ranks: Callable[[], Collection[int] | None]
    queue: Callable[[], Mapping[str, int]]
    families: Callable[[], Any]
    """Awaitable: the parts' metrics (`PartsMetrics.families`)."""
    block_bytes: int
    """Of KV in a block of the device pool."""
    ending: Callable[[], bool] = lambda: False
    """Whether this ingress is being stopped, and waits for its requests."""


class Feed:
    """See the module's docstring."""

    def __init__(self, control: ManagerControl, decisions: Decisions, sources: Sources) -> None:
        self._control = control
        self._watchers = decisions.watchers
        self._savings = decisions.savings
        self._sources = sources
        self._snapshot = ManagerSnapshot(block_bytes=sources.block_bytes)
        self._heard_at = self._sized_at = float("-inf")
        self._seen = -1
        self._ticking: asyncio.Task[None] | None = None
        self._sizing: asyncio.Task[None] | None = None
        self._watchers.changed = self._change

    def _change(self) -> None:
        if len(self._watchers) and self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick_on())
        elif time.monotonic() - self._heard_at < 2 * EVERY_S:
            self._show()  # a newcomer need not wait for the next second

    async def _tick_on(self) -> None:
        try:
            while len(self._watchers):
                began = time.monotonic()
                if self._sources.ending():
                    self._watchers.end()
                    return
                await self._tick()
                await asyncio.sleep(max(0.0, began + EVERY_S - time.monotonic()))
        except Exception:
            logger.exception("no client is told of the cache any more; the next one to watch starts this again")
        finally:
            self._ticking, self._seen = None, -1

    async def _tick(self) -> None:
        tenants = sorted({self._sources.tag(watcher.tenant) for watcher in self._watchers if not watcher.admin})
        manager: Mapping[str, Any] | None = None
        try:
            async with asyncio.timeout(ASK_S):
                manager = await self._control.live(self._seen, tenants)
        except Exception as error:
            if self._snapshot.manager is not None or self._seen < 0:
                logger.warning("the KV manager is away: %r", error)
        self._snapshot = dataclasses.replace(self._snapshot, manager=manager)
        self._heard_at = now = time.monotonic()
        rates = (None, None) if manager is None else (manager["prefill_s"], manager["early_prefill_s"])
        self._savings.tick(now, *rates)
        if manager is not None:
            self._tell_directives(manager)
        if any(watcher.admin for watcher in self._watchers) and now - self._sized_at > SIZES_EVERY_S:
            self._sized_at = now
            self._sizing = asyncio.get_running_loop().create_task(self._size())
        self._show()

    def _tell_directives(self, manager: Mapping[str, Any]) -> None:
        """The newest orders; of a manager that has been recreated, those from now on."""
        self._seen = manager["last"]
        if manager["missed_directives"]:
            self._watchers.tell_admins("dropped", {"directives": manager["missed_directives"]})
        for order in manager["directives"]:
            places = {end: _place(order[end]) for end in ("source", "target")}
            self._watchers.tell_admins("directive", {**order, **places})

    def _show(self) -> None:
        live = list(self._sources.live())
        ranks = self._sources.ranks() or ()
        for_all: tuple[str, dict[str, Any]] | None = None
        for watcher in self._watchers:
            if watcher.admin and for_all is None:
                everybody = self._savings.everybody
                for_all = "cache", for_admin(self._snapshot, everybody, live, ranks, self._sources.queue())
            watcher.show(for_all if watcher.admin and for_all else self._of_tenant(watcher, live))

    def _of_tenant(self, watcher: Watcher, live: Iterable[LivePrompt]) -> tuple[str, dict[str, Any]]:
        tenant = watcher.tenant
        own = self._savings.of(tenant)
        return "cache", for_tenant(self._snapshot, tenant, self._sources.tag(tenant), own, live)

    async def _size(self) -> None:
        families: Iterable[Metric] = await self._sources.families()
        sizes = {
            int(sample.labels["replica"]): int(sample.value)
            for family in families
            if family.name == _POOL
            for sample in family.samples
            if sample.labels.get("replica", "").isdecimal()
        }
        self._snapshot = dataclasses.replace(self._snapshot, device_blocks=sizes or self._snapshot.device_blocks)


def _place(place: tuple[str, str] | None) -> dict[str, str] | None:
    """A node by the beginning of its id, as in the metrics; a device by its replica's number."""
    return None if place is None else {"tier": place[0], "holder": place[1][:8]}
