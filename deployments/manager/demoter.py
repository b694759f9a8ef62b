"""Copies segments from the CPU tiers to Redis, in the background, as the brain orders (`kvmanager.moves.demotions`).

Life of a demotion:  ordered (room reserved, copies leased) → room made in Redis → copied by the tier's prefetch
worker → committed, or given up. A few run at once and no more are ordered before one ends: what does not get its turn
is dropped by the brain, so that saving to Redis is what suffers when Redis is slow, never loading from it.

Runs on the manager's event loop and waits for tiers only.
"""

from __future__ import annotations

import asyncio
import logging
import time

from deployments.manager.tier_registry import TierRegistry
from kvmanager.index.locations import REDIS, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.demotions import Demotion
from kvmanager.segments.forms import DENSE
from kvmanager.segments.keys import SegmentKey

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 2
MOST_BYTES = 16 * 1024**2
"""In one demotion: enough to keep a connection busy, little enough for a slow one to finish in time."""
ANSWER_S = 25.0
"""Longer than the tier waits for its worker (`deployments.cpu_tier.actor.PUSH_S`)."""
PAUSE_S = 2.0
"""Time without demotions after Redis took nothing (full, unreachable)."""


class Demoter:
    """See the module's docstring."""

    def __init__(self, brain: KVManager, tiers: TierRegistry) -> None:
        self._brain = brain
        self._tiers = tiers
        self._due = asyncio.Event()
        self._free = MOST_AT_ONCE
        self._paused_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_event_loop().create_task(self._run())

    def wake(self) -> None:
        """There may be something to demote."""
        self._due.set()

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._start_what_is_due()
            except Exception:
                logger.exception("ordering demotions failed")

    async def _start_what_is_due(self) -> None:
        if not self._tiers.redis_is_ready:
            return
        while self._tiers.redis_is_ready and (directives := self._brain.relieve(time.monotonic())):
            self._tiers.send(directives)
            await asyncio.sleep(0)  # requests that wait for a plan get it
        while self._free and self._tiers.redis_is_ready and time.monotonic() >= self._paused_until:
            demotion = self._brain.next_demotion(time.monotonic(), MOST_BYTES)
            if demotion is None:
                return
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._demote(demotion))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _demote(self, demotion: Demotion) -> None:
        stored: dict[SegmentKey, int] = {}
        forms: dict[SegmentKey, bytes] = {}
        reason = "no_answer"
        try:
            tier = self._tiers.cpu.get(demotion.source.holder)
            self._tiers.send(demotion.evict)
            if tier is not None and await self._tiers.settled(REDIS):
                sizes, reason, forms = await asyncio.wait_for(tier.handle.demote.remote(list(demotion.keys)), ANSWER_S)
                stored = dict(zip(demotion.keys, sizes, strict=False))  # as many of the first as were stored
        except Exception as error:
            logger.warning("a demotion to Redis failed: %r", error)
        finally:
            self._free += 1
            if reason:
                self._paused_until = time.monotonic() + PAUSE_S
            source = demotion.source.tier.value, demotion.source.holder
            outcome = f"failed ({reason})" if reason else "done"
            self._tiers.log.note("demote", source, (Tier.REDIS.value, ""), len(stored), outcome)
            self._brain.forms.note({key: forms.get(key, DENSE) for key in stored})
            due = self._brain.finish_demotion(time.monotonic(), demotion.demotion_id, stored)
            self.wake()
        self._tiers.send(due)
