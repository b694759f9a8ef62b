"""Has Redis keep what was used from expiring (`kvmanager.moves.renewals`), and mends what it has lost all the same.

A segment that turns out to be missing when it is renewed, because Redis has evicted it or it was deleted there, is
copied there once more where a CPU tier has it: else all that hangs on it would be lost with it. Where none has, the
brain forgets it.

One call to Redis at a time; a renewal that fails comes again with a later use. Runs on the manager's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from deployments.manager.tier_registry import TierRegistry
from kvmanager.index.locations import REDIS
from kvmanager.manager import KVManager
from kvmanager.moves.directives import Evict
from kvmanager.segments.forms import DENSE
from kvmanager.segments.keys import SegmentKey

logger = logging.getLogger(__name__)

MOST_RENEWED = 1000
"""Segments of one call, or a longer chain: some milliseconds of Redis."""
RENEW_S = 5.0
COPY_S = 25.0
"""As long as a demotion (`deployments.manager.demoter.ANSWER_S`)."""


class RedisRenewer:
    """See the module's docstring. `drop` is told of segments of Redis that are lost."""

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
        sizes, reason, forms = await asyncio.wait_for(tier.handle.demote.remote([key]), COPY_S)
        if reason not in ("", "not_here"):
            return  # Redis cannot be written now: the next replica that misses the segment reports it again
        if not sizes or sizes[0] > indexed.nbytes:
            self._drop([key])
        elif self._brain.renewals.indexed(key) is None:
            self._tiers.send([Evict(REDIS, (key,))])  # the books would not count it
        else:
            self._brain.forms.note({key: forms.get(key, DENSE)})
            self._brain.renewals.restored()
