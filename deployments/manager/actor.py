"""The KV-manager actor: the pure brain (`kvmanager.manager.KVManager`) with a clock and ears.

One asyncio actor, so every method below runs to its first `await` without interruption and the brain needs no lock.
It waits for others only where their answer is needed (evictions before an offer is granted, `clear`), never on the
path of a plan.

* Replicas register, ask for plans, offer segments, report their device pool, and long-poll `take_directives`.
* Tiers register and report what they hold; evictions and demotions are sent to them.
* The Redis tier does too; what lies in Redis is forgotten with its registration, and indexed anew by the next one.
* Routers long-poll `deltas`.

State is rebuilt, not stored: a new manager answers "unknown" to heartbeats, and replicas and tiers then tell it
everything again (DESIGN §4, rule 9).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments.manager.control import ControlOrders
from deployments.manager.demoter import Demoter
from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.gc_freeze import GcFreeze
from deployments.manager.redis_renewer import RedisRenewer
from deployments.manager.replica_seat import ReplicaSeat, names_by_rank, succeeded_by
from deployments.manager.tier_registry import TierRegistry
from deployments.protocol.call_batches import CallBatches
from deployments.protocol.kv_port import PlanExpectation
from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import Deltas, Position
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.loading.load_choice import LoadChoice, LoadMode
from kvmanager.loading.load_rates import ALL_REPLICAS, LateSample, Sample
from kvmanager.manager import KVManager
from kvmanager.moves.directives import evict
from kvmanager.routing.cost import STARTING_CREDITS
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import SegmentSpan

if TYPE_CHECKING:
    from deployments.segment_store.endpoint import RedisEndpoint

logger = logging.getLogger(__name__)

REPLICA_SILENCE_S = 30.0
"""A replica that has not polled for so long is forgotten, with all it had on its device."""
EXPIRE_EVERY_S = 1.0
MOST_DELTAS = 4096
"""Segments and blocks in the events of one answer to a router; the rest follows in the next."""


class KVManagerActor(CallBatches, ControlOrders):
    """See the module's docstring. `now` is this process's monotonic clock everywhere."""

    def __init__(
        self,
        config: ManagerConfig,
        with_redis: bool = False,
        quotas: Mapping[Tier, Mapping[str, int]] | None = None,
    ) -> None:
        """`quotas`: by tier, the bytes that belong to each tenant, named by its tag."""
        self._brain = KVManager(config, epoch=random.getrandbits(48))
        for tier, shares in (quotas or {}).items():
            self._brain.set_quotas(tier, shares)
        self._replicas: dict[str, ReplicaSeat] = {}
        self._ended: collections.Counter[str] = collections.Counter({"dead": 0, "hung": 0})
        self._fingerprint: bytes | None = None
        self._seats = TierRegistry(self._brain, with_redis, self._wake_pollers)
        self._demoter = Demoter(self._brain, self._seats)
        self._renewer = RedisRenewer(self._brain, self._seats, lambda keys: self._drop_and_evict(REDIS, keys))
        self._direction = DirectiveSender(self._brain, self._replicas)
        self._loads = LoadChoice(
            LoadMode(config.load_or_recompute),
            config.block_tokens,
            config.block_tokens * config.blocks_per_segment,
            config.most_load_s,
            STARTING_CREDITS,
        )
        self._garbage = GcFreeze()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._order_ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._sweeping: asyncio.Future[None] = asyncio.get_event_loop().create_future()
        self._sweeping.set_result(None)
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

        `fingerprint` is its model's: all replicas of an application serve one model. One that computes otherwise is
        served too, but every segment of the others is a mismatch to it, as its own are to them.
        """
        if self._replicas and fingerprint != self._fingerprint:
            logger.warning(
                "replica %s computes otherwise than those before it (other model files, vLLM, machine or environment): "
                "KV is not exchanged between them; give all nodes the same",
                replica,
            )
        self._fingerprint = fingerprint
        for other in succeeded_by(self._replicas, replica, rank, time.monotonic()):
            self._forget_replica(other)
        self._replicas[replica] = ReplicaSeat(rank, node_id, time.monotonic())
        self._brain.device_cleared(replica)
        self._brain.device_stored(replica, device_hashes)
        self._wake_pollers()

    async def replica_ends(self, replica: str, why: str) -> None:
        """A replica's last words: its engine is "dead" or "hung", and its process ends in a moment."""
        self._ended[why] += 1
        if replica in self._replicas:
            self._forget_replica(replica)

    async def plan(
        self,
        replica: str,
        node_id: str,
        hashes: Sequence[BlockHash],
        exact_hashes: Sequence[BlockHash] = (),
        prompt_tokens: int = 0,
        queued_tokens: int = 0,
    ) -> tuple[int, list[tuple[Any, ...]], list[tuple[int, float]], float, int, str, PlanExpectation] | None:
        """A lease id and `[(key, start_block, num_blocks, tier, holder, nbytes, raw_nbytes), …]` from block 0 on (see
        `deployments.protocol.kv_port.PlanDict`); how hot the prompt is: `[(end_block, score), …]` of its known
        segments, the score of one use made now, and by which clock; then why the plan is what it is, and what is
        expected of it.

        None: not registered. `queued_tokens`: what the replica has to compute before this prompt; `prompt_tokens` 0:
        as many as the hashed blocks have.
        """
        if replica not in self._replicas:
            return None
        now = time.monotonic()
        device_blocks = self._brain.offloads.device_blocks(replica, hashes)
        choice = self._loads.for_prompt(now, replica, device_blocks, len(hashes), prompt_tokens, queued_tokens)
        plan = self._brain.plan(now, replica, node_id, hashes, exact_hashes=exact_hashes, choose=choice.choose)
        self._loads.planned(choice, plan.lease_id, plan.reason)
        return (
            plan.lease_id,
            [
                (s.key, s.start_block, s.num_blocks, s.location.tier.value, s.location.holder, s.nbytes, s.raw_nbytes)
                for s in plan.segments
            ],
            list(plan.scores),
            plan.now_score,
            self._brain.epoch,
            plan.reason.value,
            PlanExpectation(
                load_s=choice.load_s,
                recompute_s=choice.recompute_s,
                device_tokens=choice.device_tokens,
                short_tokens=self._loads.short_tokens(replica),
            ),
        )

    async def release(self, lease_ids: Iterable[int]) -> None:
        """Leases that are used up."""
        for lease_id in lease_ids:
            self._brain.release(lease_id)
            self._loads.ended(lease_id)

    async def offer(
        self, replica: str, node_id: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]
    ) -> tuple[int, list[bytes]] | None:
        """Which segments the replica shall store in its node's CPU tier; None when that node has no tier."""
        if not self._seats.takes_segments(node_id):
            return None
        location = Location(Tier.CPU, node_id)
        offer = self._brain.offer(time.monotonic(), replica, location, spans, segment_bytes)
        self._seats.send(offer.evict)
        # The room must be free before the replica sends: the tier refuses what does not fit.
        if not await self._seats.settled(location):
            self._brain.abandon(offer.save_id)
            return None
        return offer.save_id, list(offer.keys)

    async def abandon(self, save_id: int) -> None:
        """A save ended; what of it was not committed gives its room back."""
        self._brain.abandon(save_id)

    async def bad_segment(self, tier: str, holder: str, key: SegmentKey) -> None:
        """A replica found that a stored segment is not what its header says."""
        self._drop_and_evict(Location(Tier(tier), holder), [key])

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

    async def report_rates(self, replica: str, samples: Sequence[Sample | LateSample]) -> None:
        """How long loads and prefills of a replica took: what routers credit a hit with."""
        if replica in self._replicas:
            self._loads.report(time.monotonic(), replica, samples)

    async def take_directives(
        self, replica: str, wait_s: float, rank: int | None = None
    ) -> list[dict[str, Any]] | None:
        """The orders for a replica, as soon as there are any; None: not registered, register first.

        `rank`: its number now, if it says so.
        """
        seat = self._replicas.get(replica)
        if seat is None:
            return None
        seat.last_seen = time.monotonic()
        if rank is not None and rank != seat.rank:
            seat.rank = rank
            self._wake_pollers()
        orders: list[dict[str, Any]] = []
        try:
            orders.append(await asyncio.wait_for(seat.orders.get(), wait_s))
            while not seat.orders.empty():
                orders.append(seat.orders.get_nowait())
        except TimeoutError:
            pass
        return self._direction.deliver(orders)

    async def acknowledge(self, order_id: int, result: Any) -> None:
        """A replica has carried out an order; the result of a directive is a dict
        (`deployments.engine.directive_runner`)."""
        if isinstance(result, Mapping):
            self._direction.acknowledge(order_id, result)
            return
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
        told: bool = True,
    ) -> list[bytes]:
        """A tier introduces itself with what it holds (parents first); returns the keys that it shall keep.

        Not `told`: this is only the beginning of what it holds, and the rest follows by `adopt_tier`.
        """
        self._seats.seat_cpu(time.monotonic(), node_id, handle, incarnation, budget_bytes, told=False)
        self._loads.tier_is_back(Tier.CPU)
        logger.info("CPU tier of node %s: %d bytes budget", node_id[:8], budget_bytes)
        return await self.adopt_tier(node_id, incarnation, spans, segment_bytes, told) or []

    async def adopt_tier(
        self, node_id: str, incarnation: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int], told: bool
    ) -> list[bytes] | None:
        """More of what a tier holds (parents first, over all calls), the last of it if `told`; plans go on in between.

        Returns the keys that it shall keep; None when it is not known here (any more), which says nothing about them.
        """
        if not self._seats.cpu_told(time.monotonic(), node_id, incarnation, told):
            return None
        kept = self._brain.adopt(time.monotonic(), Location(Tier.CPU, node_id), spans, segment_bytes)
        self._wake_pollers()
        self._demoter.wake()
        return list(kept)

    async def promote(self, replica: str, node_id: str, keys: Sequence[SegmentKey]) -> tuple[int, list[bytes]]:
        """A node's tier fetches segments from Redis for a replica: which of them shall stay, under which save id."""
        if not self._seats.takes_segments(node_id):
            return 0, []
        location = Location(Tier.CPU, node_id)
        offer = self._brain.promote(time.monotonic(), replica, location, keys)
        self._seats.send(offer.evict)
        if not await self._seats.settled(location):
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
        if tier == Tier.REDIS.value:
            await self._renewer.mend(keys)
        else:
            self._drop_and_evict(Location(Tier(tier), holder), keys)

    # Redis.

    async def redis_alive(self, incarnation: str, state: str) -> dict[str, Any]:
        """The Redis tier's heartbeat, with what /health shall say of it."""
        known = self._seats.redis_alive(time.monotonic(), incarnation, state)
        return {"known": known, "fingerprint": self._fingerprint}

    async def register_redis(self, handle: Any, incarnation: str, endpoint: RedisEndpoint, budget_bytes: int) -> None:
        """The Redis tier can be used from now on; what lies there is told by `adopt_redis`."""
        self._seats.seat_redis(time.monotonic(), handle, incarnation, endpoint, budget_bytes)
        self._loads.tier_is_back(Tier.REDIS)

    async def adopt_redis(
        self, incarnation: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int], raw_bytes: Sequence[int]
    ) -> list[bytes]:
        """Segments that lie in Redis (parents before children, over all calls); returns the keys that it shall keep.

        `segment_bytes` is what each takes there, `raw_bytes` what it takes in a CPU tier.
        """
        if not self._seats.is_redis(incarnation):
            return []
        kept = self._brain.adopt(time.monotonic(), REDIS, spans, segment_bytes, raw_bytes)
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

    async def deltas(self, seen: Position, wait_s: float) -> tuple[Deltas, dict[str, int], dict[str, dict[str, float]]]:
        """What comes after `seen`, as soon as there are any, every replica's rank, and the measured credits."""
        found = self._brain.deltas_since(seen, MOST_DELTAS)
        if not found.events and found.part is None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
            found = self._brain.deltas_since(seen, MOST_DELTAS)
        ranks = {replica: seat.rank for replica, seat in self._replicas.items()}
        return found, ranks, self._loads.credits(time.monotonic())

    async def lookup(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """Where the leading blocks of a prompt lie. Replicas are named by rank."""
        found = self._brain.lookup(hashes)
        found["device"] = {
            str(rank): found["device"][replica]
            for rank, replica in names_by_rank(self._replicas).items()
            if replica in found["device"]
        }
        return found

    async def stats(self) -> dict[str, Any]:
        """The brain's books, and every tier's own count beside them."""
        stats = self._brain.stats(time.monotonic())
        stats["replicas"] = {str(rank): replica for rank, replica in names_by_rank(self._replicas).items()}
        stats["replicas_ended"] = dict(self._ended)
        stats["credits"] = self._loads.credits(time.monotonic()).get(ALL_REPLICAS, {})
        stats["load_or_recompute"] = self._loads.describe()
        stats["directives"] = self._direction.report()
        stats["cpu_tiers"], stats["redis"] = await self._seats.stats()
        return stats

    async def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """What a tenant (by tag) may know of the cache: its own share, and nothing of where it lies."""
        return self._brain.tenant_stats(time.monotonic(), tenant)

    async def parts(self) -> dict[str, Any]:
        """Who is registered, for /health: each replica's rank and the seconds since it last reported, and tiers."""
        now = time.monotonic()
        return {
            "replicas": {name: (seat.rank, now - seat.last_seen) for name, seat in self._replicas.items()},
            "cpu_tiers": sorted(self._seats.cpu),
            "redis": self._seats.redis_report(),
        }

    # Inside.

    def _drop_and_evict(self, location: Location, keys: Sequence[SegmentKey]) -> None:
        """Free segments that cannot be used, and what hangs on them."""
        self._seats.send([evict(location, tuple(keys))])
        self._seats.send(self._brain.dropped(time.monotonic(), location, keys))
        self._wake_pollers()

    def _forget_replica(self, replica: str) -> None:
        del self._replicas[replica]
        self._brain.forget_replica(replica)
        self._direction.forget_replica(replica)
        self._loads.forget_replica(replica)
        self._wake_pollers()

    def _wake_pollers(self) -> None:
        self._changed.set()
        if self._brain.sweeping and self._sweeping.done():
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        """Do what the brain does in slices (`kvmanager.index.sweeps`); after each, whoever waits for a plan gets it."""
        try:
            while self._brain.sweeping:
                self._seats.send(self._brain.sweep(time.monotonic()))
                await asyncio.sleep(0)
        except Exception:
            logger.exception("the index could not be swept")

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            now = time.monotonic()
            try:
                self._seats.send(self._brain.expire(now))
                self._renewer.tick()
                self._wake_pollers()
                self._demoter.wake()
                for replica, seat in list(self._replicas.items()):
                    if now - seat.last_seen > REPLICA_SILENCE_S:
                        logger.warning("replica %s (rank %d) is silent and forgotten", replica, seat.rank)
                        self._forget_replica(replica)
                self._seats.forget_silent(now)
                self._direction.keep_house({node: self._seats.takes_segments(node) for node in self._seats.cpu})
                self._garbage.set_aside(self._brain.stats(now)["nodes"])
            except Exception:
                logger.exception("housekeeping failed")
