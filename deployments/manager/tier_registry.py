"""The shared tiers as the KV manager sees them: a state for each, and what each still has to evict.

A state has the tier's handle and incarnation (a process that was started again is another incarnation, and empty), and
when it was last heard. A tier is unregistered by its silence, by its own word or by failing at an eviction. The brain
then forgets all that it holds; it registers again and tells what it has. A slow tier stays registered
(`EvictionQueue`). Nothing here is on a request's path. Runs on the manager's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployments.manager.directive_log import DirectiveLog
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.directives import DirectiveKind, Evict
from kvmanager.segments.keys import SegmentKey

if TYPE_CHECKING:
    from deployments.segment_store.endpoint import RedisEndpoint

logger = logging.getLogger(__name__)

OK = "ok"
NO_WORKER = "no prefetch worker is ready yet"
WAITS = "Redis is ready and waits for the first replica"
TIER_SILENCE_S = 15.0
"""A tier that was not heard for this time is unregistered."""
ANSWER_S = 1.0
"""Longest wait for a tier to count, and of a save for a tier to make room."""
CHUNK_KEYS = 1000
"""In one call to a tier: a CPU tier needs a few milliseconds, Redis two round trips."""
EVICTED_S = 60.0
"""Longest wait for one chunk: several times what a tier takes at its slowest. Then what it holds is unknown."""


class EvictionQueue:
    """Pending evictions of one tier's actor: in order, in chunks, however long the tier takes.

    The manager has given the room away, and forgotten the segments, when an eviction is ordered; the tier has them
    until it has evicted them. So nothing is granted at a location before `settled`: else the room would not be there,
    or a segment that is stored again would fall to the eviction of its first copy. A tier that is slow, or hangs, makes
    saves wait there and come to nothing. It is heard or not by its heartbeat, not by how long a chunk takes. `failed`
    is called, once, when an eviction was not carried out.
    """

    def __init__(self, handle: Any, failed: Callable[[Exception], None]) -> None:
        self._handle = handle
        self._failed = failed
        self._waiting: deque[SegmentKey] = deque()
        self._empty = asyncio.Event()
        self._empty.set()
        self._broken = False
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Segments that the tier has not said it has evicted."""
        return len(self._waiting)

    def add(self, keys: Sequence[SegmentKey]) -> None:
        """Evict these after all that was added before, unless the tier has failed. Does not wait."""
        if keys and not self._broken:
            self._waiting.extend(keys)
            self._empty.clear()
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the tier has evicted all; False when it does not in time, or does not at all."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return not self._broken

    def close(self) -> None:
        """The tier is unregistered: forget what it was to evict."""
        self._broken = True
        self._waiting.clear()
        self._empty.set()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                chunk = [self._waiting[place] for place in range(min(CHUNK_KEYS, len(self._waiting)))]
                await asyncio.wait_for(self._handle.evict.remote(chunk), EVICTED_S)
                if self._broken:  # closed while the answer came
                    return
                for _ in chunk:
                    self._waiting.popleft()
            self._empty.set()
        except Exception as error:
            self._task = None
            self.close()
            self._failed(error)


@dataclass(slots=True)
class TierState:
    """A tier's actor. An empty incarnation equals none: the tier has to register again."""

    handle: Any
    incarnation: str
    last_seen: float
    evictions: EvictionQueue
    workers: int = 0
    """Prefetch workers of this node that are ready."""
    told: bool = False
    """Whether it has told all that it holds. Until then nothing is saved there: the brain would take the tier for
    emptier than it is, and a segment for a leaf whose children are still to be told."""


@dataclass(slots=True)
class RedisState(TierState):
    """`state` is `OK` or the sentence that /health shows; `indexed`: all that lies in Redis has been told."""

    state: str = "Redis is starting"
    endpoint: RedisEndpoint | None = None
    indexed: bool = False


class TierRegistry:
    """See the module's docstring. `changed` is called when plans may have become better or worse."""

    def __init__(self, brain: KVManager, with_redis: bool, changed: Callable[[], None]) -> None:
        self.cpu: dict[str, TierState] = {}
        self._redis = RedisState(None, "", float("-inf"), EvictionQueue(None, _nothing)) if with_redis else None
        self.log = DirectiveLog()
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

    def register_cpu(self, now: float, node_id: str, handle: Any, incarnation: str, budget_bytes: int) -> None:
        """Register a node's tier; what was known of that node is forgotten."""
        location = Location(Tier.CPU, node_id)
        if node_id in self.cpu:
            self.cpu[node_id].evictions.close()
        self._brain.forget_holder(location)
        self._brain.set_budget(location, budget_bytes)

        def failed(error: Exception) -> None:
            logger.warning("the CPU tier %s did not evict: %r", node_id[:8], error)
            tier.incarnation = ""  # what it holds is unknown now: it must register again

        tier = self.cpu[node_id] = TierState(handle, incarnation, now, EvictionQueue(handle, failed))
        self._changed()

    def cpu_told(self, now: float, node_id: str, incarnation: str, told: bool) -> bool:
        """A tier has told some more of what it holds, or all of it (`told`); False: it is not registered."""
        known = self.is_cpu(node_id, incarnation)
        if known:
            self.cpu[node_id].last_seen = now
            self.cpu[node_id].told = told
        return known

    def is_cpu(self, node_id: str, incarnation: str) -> bool:
        """Whether this incarnation of the node's tier is registered."""
        return node_id in self.cpu and self.cpu[node_id].incarnation == incarnation

    def takes_segments(self, node_id: str) -> bool:
        """Whether segments may be saved in the node's tier now."""
        return node_id in self.cpu and self.cpu[node_id].told

    async def block_hashes(self, node_id: str, keys: Sequence[SegmentKey]) -> list[bytes]:
        """What a CPU tier says that the blocks of segments are called, joined for each; nothing when it does not."""
        tier = self.cpu.get(node_id)
        if tier is None:
            return []
        try:
            async with asyncio.timeout(ANSWER_S):
                return list(await tier.handle.block_hashes.remote(list(keys)))
        except Exception as error:
            logger.warning("the CPU tier %s does not name its segments: %r", node_id[:8], error)
            return []

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
        """Whether this incarnation of the Redis tier is registered."""
        return self._redis is not None and bool(incarnation) and self._redis.incarnation == incarnation

    def redis_alive(self, now: float, incarnation: str, state: str) -> bool:
        """Take a heartbeat, with the state for /health; False: not known here."""
        if self._redis is None:
            return True
        self._redis.last_seen = now
        self._redis.state = state
        return self.is_redis(incarnation)

    def register_redis(
        self, now: float, handle: Any, incarnation: str, endpoint: RedisEndpoint, budget_bytes: int
    ) -> None:
        """Register the Redis tier; what was known of Redis is forgotten."""
        if self._redis is not None:
            self._redis.evictions.close()
            self._brain.forget_holder(REDIS)
            self._brain.set_budget(REDIS, budget_bytes)

            def failed(error: Exception) -> None:
                logger.warning("the Redis tier did not evict: %r", error)
                if self.is_redis(incarnation):
                    self.lose_redis("an eviction failed; registering again")

            evictions = EvictionQueue(handle, failed)
            self._redis = RedisState(handle, incarnation, now, evictions, state=self._redis.state, endpoint=endpoint)
            self._changed()

    def redis_indexed(self) -> None:
        """All that lies in Redis has been told: copying to it may begin."""
        if self._redis is not None:
            self._redis.indexed = True
            logger.info("Redis: %d segments are indexed", self._redis_segments())

    def lose_redis(self, state: str) -> None:
        """Nothing in Redis can be used until it is registered again."""
        if self._redis is not None:
            logger.warning("Redis is not used: %s", state)
            self._redis.evictions.close()
            self._brain.forget_holder(REDIS)
            self._redis.incarnation, self._redis.indexed, self._redis.state = "", False, state
            self._changed()

    async def renew(self, keys: Sequence[SegmentKey]) -> list[SegmentKey]:
        """Let Redis keep segments from expiring; returns those that are not there. Raises what its actor does."""
        assert self._redis is not None
        return list(await self._redis.handle.renew.remote(list(keys)))

    def redis_report(self) -> dict[str, Any] | None:
        """For /health; None: this server has no Redis. `indexing`: it is there, and about to be usable."""
        tier = self._redis
        if tier is None:
            return None
        workers = any(tier.workers for tier in self.cpu.values())
        state = NO_WORKER if tier.state == OK and not workers else tier.state
        coming = bool(tier.incarnation) or tier.state == WAITS
        indexing = coming and not (tier.indexed and workers)
        return {"state": state, "indexing": indexing, "segments": self._redis_segments()}

    # All.

    def send(self, directives: Sequence[Evict]) -> None:
        """Let tiers evict what they are ordered to, after all that they were ordered before. Does not wait."""
        for directive in directives:
            state = self._state_of(directive.source)
            if state is not None and state.incarnation:  # else it is forgotten as a whole already
                state.evictions.add(directive.keys)
                tier, holder = directive.source
                self.log.note(DirectiveKind.EVICT.value, (tier.value, holder), None, len(directive.keys))
        if directives:
            self._changed()

    async def settled(self, location: Location) -> bool:
        """Wait until a tier has evicted all that it was ordered to, for `ANSWER_S`; False when it has not by then.

        Nothing is stored at a location before: the room that it was promised would not be there.
        """
        tier = self._state_of(location)
        return tier is None or await tier.evictions.settled(ANSWER_S)

    async def all_settled(self, tiers: Sequence[Tier], timeout_s: float) -> None:
        """The same for whole tiers, in time or not."""
        states: list[TierState] = list(self.cpu.values()) if Tier.CPU in tiers else []
        if self._redis is not None and Tier.REDIS in tiers:
            states.append(self._redis)
        await asyncio.gather(*(tier.evictions.settled(timeout_s) for tier in states))

    def _state_of(self, location: Location) -> TierState | None:
        return self._redis if location.tier is Tier.REDIS else self.cpu.get(location.holder)

    async def stats(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Each tier's own count: the CPU tiers' by node, and Redis's."""
        states = dict(self.cpu)
        own = await asyncio.gather(*map(_count, states.values()))
        redis = None if self._redis is None else await _count(self._redis)
        return dict(zip(states, own, strict=True)), redis

    def forget_silent(self, now: float) -> None:
        """Unregister tiers that were not heard for too long."""
        for node_id, tier in list(self.cpu.items()):
            if now - tier.last_seen > TIER_SILENCE_S:
                logger.warning("the CPU tier of node %s is silent: its segments are misses", node_id[:8])
                self.cpu.pop(node_id).evictions.close()
                self._brain.forget_holder(Location(Tier.CPU, node_id))
                self._changed()
        if self._redis and self._redis.incarnation and now - self._redis.last_seen > TIER_SILENCE_S:
            self.lose_redis("its actor is silent")

    def _redis_segments(self) -> int:
        stores = self._brain.stats(float("-inf"))["locations"]
        return next((store["segments"] for store in stores if store["tier"] == Tier.REDIS.value), 0)


async def _count(tier: TierState) -> dict[str, Any]:
    if not tier.incarnation:
        return {"error": tier.state if isinstance(tier, RedisState) else "it registers again"}
    try:
        own: dict[str, Any] = await asyncio.wait_for(tier.handle.stats.remote(), ANSWER_S)
    except Exception as error:
        return {"error": str(error)}
    return own


def _nothing(error: Exception) -> None:
    """Of a queue that is never asked."""
