"""The KV-manager actor: the pure brain (`kvmanager.manager.KVManager`) with a clock and ears.

One asyncio actor, so every method below runs to its first `await` without interruption and the brain needs no lock.
It waits for others only where their answer is needed (evictions before an offer is granted, `clear`), never on the
path of a plan.

* Replicas register, ask for plans, offer segments, report their device pool, and long-poll `take_directives`; routers
  long-poll `deltas`.
* Tiers register and report what they hold; evictions and demotions are sent to them.
* The Redis tier does too; what lies in Redis is forgotten with its registration, and indexed again by the next.

State is rebuilt, not stored: a new manager answers "unknown" to heartbeats, and replicas and tiers then tell it
everything again (DESIGN §4, rule 9).
"""

from __future__ import annotations

import asyncio
import collections
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments.manager.config import load_choice
from deployments.manager.control import Control, ManagerApi
from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.index_watch import IndexWatch
from deployments.manager.prompt_control import PromptControl
from deployments.manager.redis_copies import Demoter, RedisRenewer
from deployments.manager.replica_state import ReplicaState, silent, succeeded_by, warn_of_another_model
from deployments.manager.reports import Reports, RouterNews
from deployments.manager.tier_registry import TierRegistry
from deployments.protocol.call_batches import carry_out
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.kv_port import OfferedBlocks, PrefetchGrant
from deployments.protocol.memory import GcFreeze, keep_giving_back
from kvmanager.config import ManagerConfig
from kvmanager.extensions import plan_extensions
from kvmanager.index.deltas import Position
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.loading.load_choice import LoadChoice
from kvmanager.loading.load_rates import ExtensionSample, LateSample, Sample
from kvmanager.manager import KVManager
from kvmanager.moves.directives import DirectiveOrder, DirectiveResult, Evict
from kvmanager.moves.plan import Plan, PlanQuery
from kvmanager.moves.saves import Offer
from kvmanager.routing.roles import RoleBook, RoleShares
from kvmanager.scheduling.rebalancing import KVReport
from kvmanager.segments.forms import DENSE
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import SegmentSpan

if TYPE_CHECKING:
    from deployments.segment_store.endpoint import RedisEndpoint


logger = logging.getLogger(__name__)


class PromptPlanner:
    """The answers to replicas about prompts: plans under a lease. Never waits. `now`: seconds on the actor's clock."""

    def __init__(self, brain: KVManager, loads: LoadChoice) -> None:
        self._brain = brain
        self._loads = loads

    def plan(self, now: float, replica: str, node_id: str, query: PlanQuery) -> Plan:
        """Return the stored KV of a registered replica's prompt that is worth loading, under a lease."""
        device_blocks = self._brain.offloads.device_blocks(replica, query.hashes)
        choice = self._loads.for_prompt(now, replica, device_blocks, query)
        plan = self._brain.plan(now, replica, node_id, query, choice)
        self._brain.extend_lease(plan.lease_id, choice.deadline_s + choice.reads_s)
        self._loads.planned(choice, plan.lease_id, plan.reason)
        return plan

    def release(self, lease_ids: Iterable[int]) -> None:
        """Leases that are used up."""
        for lease_id in lease_ids:
            self._brain.release(lease_id)
            self._loads.ended(lease_id)


class KVManagerActor:
    """See the module's docstring. `now` is this process's monotonic clock everywhere."""

    def __init__(
        self,
        config: ManagerConfig,
        with_redis: bool = False,
        quotas: Mapping[Tier, Mapping[str, int]] | None = None,
        roles: RoleShares = RoleShares(),  # noqa: B008  # frozen
    ) -> None:
        """`quotas`: by tier, the bytes that belong to each tenant, named by its tag."""
        self._loads = load_choice(config)
        extensions = plan_extensions(config.extensions, self._loads)
        self._brain = KVManager(config, epoch=random.getrandbits(48), extensions=extensions)
        for tier, shares in (quotas or {}).items():
            self._brain.set_quotas(tier, shares)
        self._replicas: dict[str, ReplicaState] = {}
        self._ended: collections.Counter[str] = collections.Counter({"dead": 0, "hung": 0})
        self._fingerprint: bytes | None = None
        self._watch = IndexWatch(self._brain, lambda directives: self._tiers.send(directives))
        self._tiers = TierRegistry(self._brain, with_redis, self._watch.wake)
        self._demoter = Demoter(self._brain, self._tiers)
        self._renewer = RedisRenewer(self._brain, self._tiers, lambda keys: self._drop_and_evict(REDIS, keys))
        self._directives = DirectiveSender(self._brain, self._replicas, self._tiers.log)
        self._prompts = PromptPlanner(self._brain, self._loads)
        self._roles = RoleBook(roles)
        known = self._replicas, self._ended, self._roles
        self._reports = Reports(self._brain, *known, self._loads, self._directives, self._tiers, self._watch)
        parts = self._brain, self._replicas, self._directives, self._tiers
        control = Control(*parts, self._watch)
        orders = PromptControl(*parts, self._ordered)
        self._api = ManagerApi(control, orders, self._reports, self._directives)
        self._garbage = GcFreeze()
        keep_giving_back()
        self._housekeeping = asyncio.get_event_loop().create_task(keep_house(self._tidy))

    # Replicas.

    async def register_replica(
        self, replica: str, rank: int, node_id: str, device_hashes: list[BlockHash], facts: EngineFacts
    ) -> None:
        """A replica introduces itself, or does so again to a new manager, with what its device pool holds.

        All replicas of an application serve one model. One that computes otherwise is served too, but every segment of
        the others is a mismatch to it, as its own are to them.
        """
        warn_of_another_model(replica, facts.fingerprint, self._fingerprint if self._replicas else None)
        self._fingerprint = facts.fingerprint
        for other in succeeded_by(self._replicas, replica, rank, time.monotonic()):
            self._forget_replica(other)
        self._replicas[replica] = ReplicaState(rank, node_id, time.monotonic(), apart=facts.apart)
        if role := self._roles.join(replica):
            logger.info("replica %s (rank %d) has the role %s", replica, rank, role)
        self._brain.device_cleared(replica)
        self._brain.device_stored(replica, device_hashes)
        self._watch.wake()

    async def replica_ends(self, replica: str, why: str = "") -> None:
        """A replica's last words: its engine is "dead" or "hung". Without a reason nothing is wrong: Serve ends it."""
        self._ended.update([why] if why else [])
        if replica in self._replicas:
            self._forget_replica(replica)

    async def plan(self, replica: str, node_id: str, query: PlanQuery) -> Plan | None:
        """Return the stored KV of a prompt that is worth loading, under a lease; None: not registered."""
        if replica not in self._replicas:
            return None
        return self._prompts.plan(time.monotonic(), replica, node_id, query)

    async def release(self, lease_ids: Iterable[int]) -> None:
        """Leases that are used up."""
        self._prompts.release(lease_ids)

    async def offer(
        self, replica: str, node_id: str, offered: OfferedBlocks, segment_bytes: Sequence[int]
    ) -> tuple[int, list[SegmentSpan]] | None:
        """Return the segments that a replica stores of its blocks in its CPU tier; None: there is none. See
        `KVPort`."""
        if not self._tiers.takes_segments(node_id):
            return None
        location = Location(Tier.CPU, node_id)
        spans = self._brain.cut(location, *offered)
        sizes = [segment_bytes[span.num_blocks - 1] for span in spans]
        offer = self._brain.offer(time.monotonic(), replica, location, spans, sizes)
        if not await self._has_room(location, offer):
            return None
        granted = set(offer.keys)
        return offer.save_id, [span for span in spans if span.key in granted]

    async def abandon(self, save_id: int) -> None:
        """A save ended; what of it was not committed gives its room back."""
        self._brain.abandon(save_id)

    async def bad_segment(self, tier: str, holder: str, key: SegmentKey) -> None:
        """A replica found that a stored segment is not what its header says."""
        self._drop_and_evict(Location(Tier(tier), holder), [key])

    async def report_placement(
        self, replica: str, changes: Sequence[tuple[list[BlockHash], list[BlockHash], bool]]
    ) -> None:
        """Take changes of a replica's device pool, oldest first."""
        if replica not in self._replicas:
            return
        for stored, removed, cleared in changes:
            if cleared:
                self._brain.device_cleared(replica)
            self._brain.device_removed(replica, removed)
            self._brain.device_stored(replica, stored)
        self._watch.wake()

    async def report_rates(self, replica: str, samples: Sequence[Sample | LateSample | ExtensionSample]) -> None:
        """How long loads and prefills of a replica took: what routers credit a hit with."""
        if replica in self._replicas:
            self._loads.report(time.monotonic(), replica, samples)

    async def take_directives(
        self, replica: str, wait_s: float, rank: int | None = None, kv: KVReport | None = None
    ) -> list[DirectiveOrder] | None:
        """The directives for a replica, as soon as there are any; None: not registered, register first.

        `rank`: its number now, if it says so.
        """
        state = self._replicas.get(replica)
        if state is None:
            return None
        state.last_seen, state.kv = time.monotonic(), kv
        if rank is not None and rank != state.rank:
            state.rank = rank
            self._watch.wake()
        return self._directives.deliver(await state.take(wait_s))

    async def acknowledge(self, number: int, result: DirectiveResult) -> None:
        """A replica has carried out a directive (`deployments.engine.handle.EngineHandle.carry_out`)."""
        self._directives.acknowledge(number, result)

    async def batch(self, *calls: tuple[str, Sequence[Any]]) -> list[tuple[bool, Any]]:
        """See `call_batches.carry_out`."""
        return await carry_out(self, calls)

    # Tiers.

    async def tier_alive(self, node_id: str, incarnation: str, workers: int) -> tuple[bool, RedisEndpoint | None]:
        """A tier's heartbeat, with its ready workers: is it known (if not: register), and which Redis is there."""
        known = self._tiers.cpu_alive(time.monotonic(), node_id, incarnation, workers)
        return known, self._tiers.redis_endpoint

    async def register_tier(
        self,
        node_id: str,
        handle: Any,
        incarnation: str,
        budget_bytes: int,
        spans: Sequence[SegmentSpan],
        segment_bytes: Sequence[int],
        told: bool = True,
    ) -> list[bytes] | None:
        """Register a tier with what it holds (parents first), or not `told`: with the beginning of it, and the rest
        follows by `adopt_tier`. Returns the same as that."""
        self._tiers.register_cpu(time.monotonic(), node_id, handle, incarnation, budget_bytes)
        self._loads.tier_is_back(Tier.CPU)
        logger.info("CPU tier of node %s: %d bytes budget", node_id[:8], budget_bytes)
        return await self.adopt_tier(node_id, incarnation, spans, segment_bytes, told)

    async def adopt_tier(
        self, node_id: str, incarnation: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int], told: bool
    ) -> list[bytes] | None:
        """Add more of what a tier holds (parents first, over all calls), the last of it if `told`; plans go on in
        between. Returns the keys to keep; None when the tier is not known here (any more), which says nothing of
        them."""
        if not self._tiers.cpu_told(time.monotonic(), node_id, incarnation, told):
            return None
        kept = self._brain.adopt(time.monotonic(), Location(Tier.CPU, node_id), spans, segment_bytes)
        self._watch.wake()
        self._demoter.wake()
        return list(kept)

    async def prefetch(self, replica: str, node_id: str, keys: Sequence[SegmentKey]) -> PrefetchGrant:
        """Return which of the segments that a node's tier fetches from Redis for a replica it keeps."""
        if not self._tiers.takes_segments(node_id):
            return PrefetchGrant()
        location = Location(Tier.CPU, node_id)
        offer = self._brain.prefetch(time.monotonic(), replica, location, keys)
        if not await self._has_room(location, offer):
            return PrefetchGrant()
        self._tiers.log.note("promote", (Tier.REDIS.value, ""), (Tier.CPU.value, node_id), len(offer.keys))
        return PrefetchGrant(offer.save_id, offer.keys, offer.above)

    async def commit(self, node_id: str, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]) -> list[bytes]:
        """Note complete segments that a tier owns now; return the keys to keep."""
        keys = [span.key for span in spans]
        kept = self._brain.commit(time.monotonic(), Location(Tier.CPU, node_id), keys, segment_bytes)
        self._watch.wake()
        self._demoter.wake()
        return list(kept)

    async def lost(self, tier: str, holder: str, keys: Sequence[SegmentKey]) -> None:
        """A tier does not have segments that the index says it has."""
        if tier == Tier.REDIS.value:
            await self._renewer.restore(keys)
        else:
            self._drop_and_evict(Location(Tier(tier), holder), keys)

    # Redis.

    async def redis_alive(self, incarnation: str, state: str) -> dict[str, Any]:
        """Take the Redis tier's heartbeat, with its state for /health."""
        known = self._tiers.redis_alive(time.monotonic(), incarnation, state)
        return {"known": known, "fingerprint": self._fingerprint}

    async def register_redis(self, handle: Any, incarnation: str, endpoint: RedisEndpoint, budget_bytes: int) -> None:
        """The Redis tier can be used from now on; what lies there is told by `adopt_redis`."""
        self._tiers.register_redis(time.monotonic(), handle, incarnation, endpoint, budget_bytes)
        self._loads.tier_is_back(Tier.REDIS)

    async def adopt_redis(
        self,
        incarnation: str,
        spans: Sequence[SegmentSpan],
        segment_bytes: Sequence[int],
        raw_bytes: Sequence[int],
        forms: Mapping[SegmentKey, bytes],
    ) -> list[bytes]:
        """Add segments that lie in Redis (parents before children, over all calls); return the keys to keep.

        `forms`: of those that are not dense. `segment_bytes` is what each takes there, `raw_bytes` what it takes in a
        CPU tier.
        """
        if not self._tiers.is_redis(incarnation):
            return []
        kept = self._brain.adopt(time.monotonic(), REDIS, spans, segment_bytes, raw_bytes)
        self._brain.forms.note({span.key: forms.get(span.key, DENSE) for span in spans})
        self._watch.wake()
        return list(kept)

    async def redis_indexed(self, incarnation: str) -> None:
        """All that lies in Redis has been told: copying to it may begin."""
        if self._tiers.is_redis(incarnation):
            self._tiers.redis_indexed()
            self._demoter.wake()

    async def redis_lost(self, incarnation: str, state: str) -> None:
        """Redis cannot be used now: its segments are misses until it is registered again."""
        if self._tiers.is_redis(incarnation):
            self._tiers.lose_redis(state)

    # The ingress and the routers.

    async def api(self, name: str, *args: Any, **options: Any) -> Any:
        """Answer a call of the control API (`ManagerApi`)."""
        return await self._api.call(name, args, options)

    async def deltas(self, seen: Position, wait_s: float) -> RouterNews:
        """What comes after `seen`, as soon as there is anything."""
        return await self._reports.router_news(seen, wait_s)

    async def _has_room(self, location: Location, offer: Offer) -> bool:
        """Make room for what is to be stored: the tier refuses what does not fit. False: the offer is abandoned."""
        self._tiers.send(offer.evict)
        settled = await self._tiers.settled(location)
        if not settled:
            self._brain.abandon(offer.save_id)
        return settled

    def _ordered(self) -> None:
        """There is work for the background."""
        self._watch.wake()
        self._demoter.wake()

    def _drop_and_evict(self, location: Location, keys: Sequence[SegmentKey]) -> None:
        """Free segments that cannot be used, and what hangs on them."""
        self._tiers.send([Evict(location, tuple(keys))])
        self._tiers.send(self._brain.dropped(time.monotonic(), location, keys))
        self._watch.wake()

    def _forget_replica(self, replica: str) -> None:
        del self._replicas[replica]
        self._roles.leave(replica)
        for book in (self._brain, self._directives, self._loads):
            book.forget_replica(replica)
        self._watch.wake()

    def _tidy(self, now: float) -> None:
        self._tiers.send(self._brain.expire(now))
        self._renewer.tick()
        self._watch.wake()
        self._demoter.wake()
        for replica in silent(self._replicas, now):
            self._forget_replica(replica)
        self._tiers.forget_silent(now)
        self._directives.keep_house({node: self._tiers.takes_segments(node) for node in self._tiers.cpu})
        self._garbage.set_aside(self._brain.stats(now)["nodes"])


EVERY_S = 1.0


async def keep_house(tidy: Callable[[float], None]) -> None:
    """Call `tidy` with the time of `time.monotonic` for ever; an error is logged, and the next turn comes."""
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            tidy(time.monotonic())
        except Exception:
            logger.exception("housekeeping failed")
