"""The KV-manager actor: the pure brain (`kvmanager.manager.KVManager`) with a clock and ears.

One asyncio actor, so every method below runs to its first `await` without interruption and the brain needs no lock.
It waits for others only where their answer is needed (evictions before an offer is granted, `clear`), never on the
path of a plan.

* Replicas register, ask for plans, offer segments, report their device pool, and long-poll `take_orders`.
* Tiers register and report what they hold; evictions and demotions are sent to them.
* The Redis tier does too; what lies in Redis is forgotten with its registration, and indexed anew by the next one.
* Routers long-poll `deltas`.

State is rebuilt, not stored: a new manager answers "unknown" to heartbeats, and replicas and tiers then tell it
everything again (DESIGN §4, rule 9).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.demoter import Demoter
from deployments.tier_seats import TierSeats
from kvmanager.config import ManagerConfig
from kvmanager.deltas import Deltas
from kvmanager.directives import evict
from kvmanager.keys import BlockHash, SegmentKey
from kvmanager.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.segments import SegmentSpan

if TYPE_CHECKING:
    from deployments.redis_endpoint import RedisEndpoint

logger = logging.getLogger(__name__)

REPLICA_SILENCE_S = 30.0
"""A replica that has not polled for so long is forgotten, with all it had on its device."""
EXPIRE_EVERY_S = 1.0
MOST_DELTAS = 4096
"""Events in one answer to a router; the rest follows in the next."""


@dataclass(slots=True)
class ReplicaSeat:
    """A registered replica: `rank` is its number in the debug header, `orders` what it has to do."""

    rank: int
    node_id: str
    last_seen: float
    orders: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


class KVManagerActor:
    """See the module's docstring. `now` is this process's monotonic clock everywhere."""

    def __init__(self, config: ManagerConfig, with_redis: bool = False) -> None:
        self._brain = KVManager(config, epoch=random.getrandbits(48))
        self._replicas: dict[str, ReplicaSeat] = {}
        self._fingerprint: bytes | None = None
        self._seats = TierSeats(self._brain, with_redis, self._wake_pollers)
        self._demoter = Demoter(self._brain, self._seats)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._order_ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._housekeeping = asyncio.get_event_loop().create_task(self._keep_house())

    # Replicas.

    async def register_replica(
        self,
        replica: str,
        rank: int,
        node_id: str,
        device_hashes: list[BlockHash],
        fingerprint: bytes,
    ) -> None:
        """A replica introduces itself, or does so again to a new manager, with what its device pool holds.

        `fingerprint` is its model's: all replicas of an application serve one model.
        """
        self._fingerprint = fingerprint
        for other, seat in list(self._replicas.items()):
            if seat.rank == rank and other != replica:
                self._forget_replica(other)
        self._replicas[replica] = ReplicaSeat(rank, node_id, time.monotonic())
        self._brain.device_cleared(replica)
        self._brain.device_stored(replica, device_hashes)
        self._wake_pollers()

    async def plan(
        self, replica: str, node_id: str, hashes: Sequence[BlockHash]
    ) -> tuple[int, list[tuple[Any, ...]]] | None:
        """A lease id and `[(key, start_block, num_blocks, tier, holder, nbytes), …]` from block 0 on.

        None: not registered.
        """
        if replica not in self._replicas:
            return None
        plan = self._brain.plan(time.monotonic(), replica, node_id, hashes)
        return plan.lease_id, [
            (s.key, s.start_block, s.num_blocks, s.location.tier.value, s.location.holder, s.nbytes)
            for s in plan.segments
        ]

    async def release(self, lease_ids: Iterable[int]) -> None:
        """Leases that are used up."""
        for lease_id in lease_ids:
            self._brain.release(lease_id)

    async def offer(
        self, replica: str, node_id: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]
    ) -> tuple[int, list[bytes]] | None:
        """Which segments the replica shall store in its node's CPU tier; None when that node has no tier."""
        if node_id not in self._seats.cpu:
            return None
        location = Location(Tier.CPU, node_id)
        offer = self._brain.offer(time.monotonic(), replica, location, spans, segment_bytes)
        # The room must be free before the replica sends: the tier refuses what does not fit.
        if not await self._seats.carry_out(offer.evict):
            self._brain.abandon(offer.save_id)
            return None
        return offer.save_id, list(offer.keys)

    async def abandon(self, save_id: int) -> None:
        """A save ended; what of it was not committed gives its room back."""
        self._brain.abandon(save_id)

    async def bad_segment(self, tier: str, holder: str, key: SegmentKey) -> None:
        """A replica found that a stored segment is not what its header says."""
        await self._drop_and_evict(Location(Tier(tier), holder), [key])

    async def report_placement(
        self, replica: str, changes: Sequence[tuple[list[BlockHash], list[BlockHash], bool]]
    ) -> None:
        """What entered and left a replica's device pool, oldest change first."""
        if replica not in self._replicas:
            return
        for stored, removed, cleared in changes:
            if cleared:
                self._brain.device_cleared(replica)
            self._brain.device_removed(replica, removed)
            self._brain.device_stored(replica, stored)
        self._wake_pollers()

    async def take_orders(self, replica: str, wait_s: float) -> list[dict[str, Any]] | None:
        """The orders for a replica, as soon as there are any; None: not registered, register first."""
        seat = self._replicas.get(replica)
        if seat is None:
            return None
        seat.last_seen = time.monotonic()
        orders: list[dict[str, Any]] = []
        try:
            orders.append(await asyncio.wait_for(seat.orders.get(), wait_s))
            while not seat.orders.empty():
                orders.append(seat.orders.get_nowait())
        except TimeoutError:
            pass
        return orders

    async def acknowledge(self, order_id: int, result: Any) -> None:
        """A replica has carried out an order."""
        future = self._pending.pop(order_id, None)
        if future is not None and not future.done():
            future.set_result(result)

    # Tiers.

    async def tier_alive(self, node_id: str, incarnation: str, workers: int) -> tuple[bool, RedisEndpoint | None]:
        """A tier's heartbeat: so many of its prefetch workers are ready.

        Answers whether it is known here (if not: register), and which Redis there is.
        """
        known = self._seats.cpu_alive(time.monotonic(), node_id, incarnation, workers)
        return known, self._seats.redis_endpoint

    async def register_tier(
        self,
        node_id: str,
        handle: Any,
        incarnation: str,
        budget_bytes: int,
        spans: Sequence[SegmentSpan],
        segment_bytes: Sequence[int],
    ) -> list[bytes]:
        """A tier introduces itself with what it holds (parents first); returns the keys that it shall keep."""
        location = Location(Tier.CPU, node_id)
        self._seats.seat_cpu(time.monotonic(), node_id, handle, incarnation, budget_bytes)
        kept = self._brain.adopt(time.monotonic(), location, spans, segment_bytes)
        logger.info("CPU tier of node %s: %d segments, %d bytes budget", node_id[:8], len(kept), budget_bytes)
        self._wake_pollers()
        self._demoter.wake()
        return list(kept)

    async def promote(self, replica: str, node_id: str, keys: Sequence[SegmentKey]) -> tuple[int, list[bytes]]:
        """A node's tier fetches segments from Redis for a replica: which of them shall stay, under which save id."""
        if node_id not in self._seats.cpu:
            return 0, []
        offer = self._brain.promote(time.monotonic(), replica, Location(Tier.CPU, node_id), keys)
        if not await self._seats.carry_out(offer.evict):
            self._brain.abandon(offer.save_id)
            return 0, []
        return offer.save_id, list(offer.keys)

    async def commit(self, node_id: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]) -> list[bytes]:
        """A tier owns complete segments now; returns the keys that it shall keep."""
        kept = self._brain.commit(
            time.monotonic(), Location(Tier.CPU, node_id), [span.key for span in spans], segment_bytes
        )
        self._wake_pollers()
        self._demoter.wake()
        return list(kept)

    async def lost(self, tier: str, holder: str, keys: Sequence[SegmentKey]) -> None:
        """A tier does not have segments that the index says it has."""
        await self._drop_and_evict(Location(Tier(tier), holder), keys)

    # Redis.

    async def redis_alive(self, incarnation: str, state: str) -> dict[str, Any]:
        """The Redis tier's heartbeat, with what /health shall say of it."""
        known = self._seats.redis_alive(time.monotonic(), incarnation, state)
        return {"known": known, "fingerprint": self._fingerprint}

    async def register_redis(self, handle: Any, incarnation: str, endpoint: RedisEndpoint, budget_bytes: int) -> None:
        """The Redis tier can be used from now on; what lies there is told by `adopt_redis`."""
        self._seats.seat_redis(time.monotonic(), handle, incarnation, endpoint, budget_bytes)

    async def adopt_redis(
        self, incarnation: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]
    ) -> list[bytes]:
        """Segments that lie in Redis (parents before children, over all calls); returns the keys that it shall keep."""
        if not self._seats.is_redis(incarnation):
            return []
        kept = self._brain.adopt(time.monotonic(), REDIS, spans, segment_bytes)
        self._wake_pollers()
        return list(kept)

    async def redis_indexed(self, incarnation: str) -> None:
        """All that lies in Redis has been told: copying to it may begin."""
        if self._seats.is_redis(incarnation):
            self._seats.redis_indexed()
            self._demoter.wake()

    async def redis_lost(self, incarnation: str, state: str) -> None:
        """Redis cannot be used now: its segments are misses until it is registered again."""
        if self._seats.is_redis(incarnation):
            self._seats.lose_redis(state)

    # Routers and people.

    async def deltas(self, seen: int, wait_s: float) -> tuple[Deltas, dict[str, int]]:
        """Changes after number `seen`, as soon as there are any, and every replica's rank."""
        found = self._brain.deltas_since(seen, MOST_DELTAS)
        if not found.events and not found.snapshot:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
            found = self._brain.deltas_since(seen, MOST_DELTAS)
        return found, {replica: seat.rank for replica, seat in self._replicas.items()}

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """Where the leading blocks of a prompt lie. Replicas are named by rank."""
        found = self._brain.lookup(hashes)
        found["device"] = {
            str(self._replicas[replica].rank): blocks
            for replica, blocks in found["device"].items()
            if replica in self._replicas
        }
        return found

    async def stats(self) -> dict[str, Any]:
        """The brain's books, and every tier's own count beside them."""
        stats = self._brain.stats(time.monotonic())
        stats["replicas"] = {str(seat.rank): replica for replica, seat in self._replicas.items()}
        stats["cpu_tiers"], stats["redis"] = await self._seats.stats()
        return stats

    async def clear(self, tiers: Sequence[str], deadline_s: float) -> dict[str, Any]:
        """Empty tiers everywhere. Leased segments stay until their lease ends. Returns what was cleared, by tier."""
        cleared: dict[str, Any] = {}
        for tier in (Tier.CPU, Tier.REDIS):
            if tier.value in tiers:
                directives = self._brain.clear({tier})
                cleared[tier.value] = sum(len(directive.keys) for directive in directives)
                await self._seats.carry_out(directives)
        if "device" in tiers:
            seats = dict(self._replicas)
            counts = await asyncio.gather(
                *(self._order(seat, {"kind": "clear_device"}, deadline_s) for seat in seats.values())
            )
            cleared["device"] = {str(seat.rank): n for seat, n in zip(seats.values(), counts, strict=True)}
        self._wake_pollers()
        return cleared

    async def parts(self) -> dict[str, Any]:
        """Who is registered, for /health: replicas by rank with the seconds since they last reported, and tiers."""
        now = time.monotonic()
        return {
            "replicas": {seat.rank: now - seat.last_seen for seat in self._replicas.values()},
            "cpu_tiers": sorted(self._seats.cpu),
            "redis": self._seats.redis_report(),
        }

    # Inside.

    async def _order(self, seat: ReplicaSeat, order: dict[str, Any], deadline_s: float) -> Any:
        """Give a replica an order and wait for its acknowledgement; None when it does not come in time."""
        order_id = next(self._order_ids)
        future = self._pending[order_id] = asyncio.get_running_loop().create_future()
        seat.orders.put_nowait({**order, "id": order_id})
        try:
            return await asyncio.wait_for(future, deadline_s)
        except TimeoutError:
            self._pending.pop(order_id, None)
            return None

    async def _drop_and_evict(self, location: Location, keys: Sequence[SegmentKey]) -> None:
        """Free segments that cannot be used, and what hangs on them.

        The tier frees them first: once the brain has forgotten them they may be saved anew.
        """
        await self._seats.carry_out([evict(location, tuple(keys))])
        unreachable = self._brain.dropped(time.monotonic(), location, keys)
        self._wake_pollers()
        await self._seats.carry_out(unreachable)

    def _forget_replica(self, replica: str) -> None:
        del self._replicas[replica]
        self._brain.forget_replica(replica)
        self._wake_pollers()

    def _wake_pollers(self) -> None:
        self._changed.set()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            now = time.monotonic()
            try:
                await self._seats.carry_out(self._brain.expire(now))
                self._demoter.wake()
                for replica, seat in list(self._replicas.items()):
                    if now - seat.last_seen > REPLICA_SILENCE_S:
                        logger.warning("replica %s is silent and forgotten", seat.rank)
                        self._forget_replica(replica)
                self._seats.forget_silent(now)
            except Exception:
                logger.exception("housekeeping failed")
