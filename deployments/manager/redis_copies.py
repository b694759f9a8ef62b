"""Copies of segments in Redis, in the background: made from those of the CPU tiers, and kept from expiring.

Runs on the manager's event loop and waits for tiers only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from deployments.manager.tier_registry import TierRegistry
from kvmanager.index.locations import REDIS, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.demotions import Demotion
from kvmanager.moves.directives import Evict
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
MOST_RENEWED = 1000
"""Segments of one call, or a longer chain: some milliseconds of Redis."""
RENEW_S = 5.0


class Demoter:
    """Copies segments from the CPU tiers to Redis as the brain orders (`kvmanager.moves.demotions`).

    Life of a demotion:  ordered (room reserved, copies leased) → room made in Redis → copied by the tier's prefetch
    worker → committed, or given up. A few run at once and no more are ordered before one ends: what does not get its
    turn is dropped by the brain, so that saving to Redis is what suffers when Redis is slow, never loading from it.
    """

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


class RedisRenewer:
    """Has Redis keep what was used from expiring (`kvmanager.moves.renewals`), and mends what it has lost all the same.

    A segment that turns out to be missing when it is renewed, because Redis has evicted it or it was deleted there, is
    copied there once more where a CPU tier has it: else all that hangs on it would be lost with it. Where none has, the
    brain forgets it. One call to Redis at a time; a renewal that fails comes again with a later use. `drop` is told of
    segments of Redis that are lost.
    """

    def __init__(self, brain: KVManager, tiers: TierRegistry, drop: Callable[[Sequence[SegmentKey]], None]) -> None:
        self._brain = brain
        self._tiers = tiers
        self._drop = drop
        self._task: asyncio.Task[None] | None = None

    def tick(self) -> None:
        """Renew what is due, unless Redis is still at it. To be called every second or so."""
        if self._tiers.redis_is_ready and (self._task is None or self._task.done()):
            keys = self._brain.renewals.take(time.monotonic(), MOST_RENEWED)
            self._task = asyncio.get_running_loop().create_task(self._renew(keys)) if keys else None

    async def restore(self, keys: Sequence[SegmentKey]) -> None:
        """Copy segments that Redis has lost there once more, parents first, or let them be forgotten."""
        try:
            for key in keys:
                await self._restore(key)
        except Exception as error:
            logger.warning("what Redis has lost was not copied there once more: %r", error)

    async def _renew(self, keys: Sequence[SegmentKey]) -> None:
        try:
            missing = await asyncio.wait_for(self._tiers.renew(keys), RENEW_S)
            await self.restore(missing[::-1])
        except Exception as error:
            logger.warning("%d segments in Redis were not renewed: %r", len(keys), error)

    async def _restore(self, key: SegmentKey) -> None:
        indexed = self._brain.renewals.indexed(key)
        if indexed is None:
            return  # it has been evicted there meanwhile
        tier = None if indexed.cpu_tier is None else self._tiers.cpu.get(indexed.cpu_tier.holder)
        if tier is None:
            self._drop([key])
            return
        sizes, reason, forms = await asyncio.wait_for(tier.handle.demote.remote([key]), ANSWER_S)
        if reason not in ("", "not_here"):
            return  # Redis cannot be written now: the next replica that misses the segment reports it again
        if not sizes or sizes[0] > indexed.nbytes:
            self._drop([key])
        elif self._brain.renewals.indexed(key) is None:
            self._tiers.send([Evict(REDIS, (key,))])  # the books would not count it
        else:
            self._brain.forms.note({key: forms.get(key, DENSE)})
            self._brain.renewals.restored()
