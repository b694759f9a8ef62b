"""The shared tiers as the KV manager sees them: a seat for every CPU tier and one for Redis.

A seat says who sits there (handle and incarnation: a process that was started again is another incarnation, and empty)
and when it was last heard. Who loses the seat, by silence, by its own word or by not answering an eviction, has
everything it holds forgotten by the brain; it registers again and tells anew what it has. Nothing here is on a
request's path. Runs on the manager's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvmanager.directives import Directive
from kvmanager.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager

if TYPE_CHECKING:
    from deployments.redis_endpoint import RedisEndpoint

logger = logging.getLogger(__name__)

OK = "ok"
NO_WORKER = "no prefetch worker is ready yet"
TIER_SILENCE_S = 15.0
"""A tier that was not heard for so long loses its seat."""
ANSWER_S = 1.0
"""Longest wait for a tier to evict or to count."""


@dataclass(slots=True)
class TierSeat:
    """A tier's actor. An empty incarnation fits nobody: whoever sits here has to register again."""

    handle: Any
    incarnation: str
    last_seen: float
    workers: int = 0
    """Prefetch workers of this node that are ready."""
    told: bool = True
    """Whether it has told all that it holds. Until then nothing is saved there: the brain would take the tier for
    emptier than it is, and a segment for a leaf whose children are still to be told."""


@dataclass(slots=True)
class RedisSeat(TierSeat):
    """`state` is `OK` or the sentence that /health shows; `indexed`: all that lies in Redis has been told."""

    state: str = "Redis is starting"
    endpoint: RedisEndpoint | None = None
    indexed: bool = False


class TierSeats:
    """See the module's docstring. `changed` is called when plans may have become better or worse."""

    def __init__(self, brain: KVManager, with_redis: bool, changed: Callable[[], None]) -> None:
        self.cpu: dict[str, TierSeat] = {}
        self._redis = RedisSeat(None, "", float("-inf")) if with_redis else None
        self._brain = brain
        self._changed = changed

    # CPU tiers.

    def cpu_alive(self, now: float, node_id: str, incarnation: str, workers: int) -> bool:
        """A heartbeat; False: not known here."""
        if not self.is_cpu(node_id, incarnation):
            return False
        self.cpu[node_id].last_seen = now
        self.cpu[node_id].workers = workers
        return True

    def seat_cpu(
        self, now: float, node_id: str, handle: Any, incarnation: str, budget_bytes: int, told: bool = True
    ) -> None:
        """Give a node's tier its seat; what was known of that node is forgotten. `told`: see `TierSeat`."""
        location = Location(Tier.CPU, node_id)
        self._brain.forget_holder(location)
        self._brain.set_budget(location, budget_bytes)
        self.cpu[node_id] = TierSeat(handle, incarnation, now, told=told)

    def cpu_told(self, now: float, node_id: str, incarnation: str, told: bool) -> bool:
        """A tier has told some more of what it holds, or all of it (`told`); False: it does not sit here."""
        known = self.is_cpu(node_id, incarnation)
        if known:
            self.cpu[node_id].last_seen = now
            self.cpu[node_id].told = told
        return known

    def is_cpu(self, node_id: str, incarnation: str) -> bool:
        """Whether this incarnation sits on the node's seat."""
        return node_id in self.cpu and self.cpu[node_id].incarnation == incarnation

    def takes_segments(self, node_id: str) -> bool:
        """Whether segments may be saved in the node's tier now."""
        return node_id in self.cpu and self.cpu[node_id].told

    # Redis.

    @property
    def redis_endpoint(self) -> RedisEndpoint | None:
        """How the prefetch workers reach Redis; None while there has never been one."""
        return self._redis.endpoint if self._redis else None

    @property
    def redis_is_ready(self) -> bool:
        """Whether Redis is there and its index complete."""
        return self._redis is not None and self._redis.indexed

    def is_redis(self, incarnation: str) -> bool:
        """Whether this incarnation sits on Redis's seat."""
        return self._redis is not None and bool(incarnation) and self._redis.incarnation == incarnation

    def redis_alive(self, now: float, incarnation: str, state: str) -> bool:
        """A heartbeat, with what /health shall say; False: not known here."""
        if self._redis is None:
            return True
        self._redis.last_seen = now
        self._redis.state = state
        return self.is_redis(incarnation)

    def seat_redis(self, now: float, handle: Any, incarnation: str, endpoint: RedisEndpoint, budget_bytes: int) -> None:
        """Give the Redis tier its seat; what was known of Redis is forgotten."""
        if self._redis is not None:
            self._brain.forget_holder(REDIS)
            self._brain.set_budget(REDIS, budget_bytes)
            self._redis = RedisSeat(handle, incarnation, now, state=self._redis.state, endpoint=endpoint)

    def redis_indexed(self) -> None:
        """All that lies in Redis has been told: copying to it may begin."""
        if self._redis is not None:
            self._redis.indexed = True
            logger.info("Redis: %d segments are indexed", self._redis_segments())

    def lose_redis(self, state: str) -> None:
        """Nothing in Redis can be used until it is registered again."""
        if self._redis is not None:
            logger.warning("Redis is not used: %s", state)
            self._brain.forget_holder(REDIS)
            self._redis.incarnation, self._redis.indexed, self._redis.state = "", False, state
            self._changed()

    def redis_report(self) -> dict[str, Any] | None:
        """For /health; None: this server has no Redis. `indexing`: it is there, and about to be usable."""
        seat = self._redis
        if seat is None:
            return None
        workers = any(tier.workers for tier in self.cpu.values())
        state = NO_WORKER if seat.state == OK and not workers else seat.state
        indexing = bool(seat.incarnation) and not (seat.indexed and workers)
        return {"state": state, "indexing": indexing, "segments": self._redis_segments()}

    # All.

    async def carry_out(self, directives: Sequence[Directive]) -> bool:
        """Send evictions to their tiers and wait; False when one did not answer."""
        if not directives:
            return True
        self._changed()
        return all(await asyncio.gather(*map(self._evict, directives)))

    async def stats(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Each tier's own count: the CPU tiers' by node, and Redis's."""
        seats = dict(self.cpu)
        own = await asyncio.gather(*map(_count, seats.values()))
        redis = None if self._redis is None else await _count(self._redis)
        return dict(zip(seats, own, strict=True)), redis

    def forget_silent(self, now: float) -> None:
        """Take the seats of tiers that were not heard for too long."""
        for node_id, seat in list(self.cpu.items()):
            if now - seat.last_seen > TIER_SILENCE_S:
                logger.warning("the CPU tier of node %s is silent: its segments are misses", node_id[:8])
                del self.cpu[node_id]
                self._brain.forget_holder(Location(Tier.CPU, node_id))
                self._changed()
        if self._redis and self._redis.incarnation and now - self._redis.last_seen > TIER_SILENCE_S:
            self.lose_redis("its actor is silent")

    async def _evict(self, directive: Directive) -> bool:
        assert directive.source is not None
        tier, holder = directive.source
        seat = self._redis if tier is Tier.REDIS else self.cpu.get(holder)
        if seat is None or not seat.incarnation:
            return True  # forgotten as a whole already
        incarnation = seat.incarnation
        try:
            await asyncio.wait_for(seat.handle.evict.remote(list(directive.keys)), ANSWER_S)
        except Exception as error:
            logger.warning("the %s tier %s did not evict: %r", tier.value, holder[:8], error)
            # What it holds is unknown now: it shall register anew.
            if tier is Tier.CPU:
                seat.incarnation = ""
            elif self.is_redis(incarnation):
                self.lose_redis("it did not answer an eviction; registering again")
            return False
        return True

    def _redis_segments(self) -> int:
        stores = self._brain.stats(float("-inf"))["locations"]
        return next((store["segments"] for store in stores if store["tier"] == Tier.REDIS.value), 0)


async def _count(seat: TierSeat) -> dict[str, Any]:
    if not seat.incarnation:
        return {"error": seat.state if isinstance(seat, RedisSeat) else "it registers again"}
    try:
        own: dict[str, Any] = await asyncio.wait_for(seat.handle.stats.remote(), ANSWER_S)
    except Exception as error:
        return {"error": str(error)}
    return own
