"""The manager's actor and its Redis tier: attached, filled in the background, lost and found again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kv_cluster import FINGERPRINT, SEGMENT_BYTES, SIZES, offered, sequence

from deployments.manager import actor, redis_copies
from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.kv_port import PrefetchGrant
from kvmanager.config import ManagerConfig
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import BlockHash
from load_tests.harness.patience import PATIENCE_S, patience

NODE, REPLICA, REDIS_LIFE = "node", "replica", "redis life"


class Remote:
    """`handle.method.remote(...)` for a coroutine function."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class FakeCPUTier:
    """Notes what it is told; `demote_answer` may be replaced."""

    def __init__(self) -> None:
        self.demoted: list[bytes] = []
        self.evicted: list[bytes] = []
        self.demote_answer: Callable[[list[bytes]], tuple[int, str]] = lambda keys: (len(keys), "")
        self.redis_bytes = SEGMENT_BYTES
        self.evict, self.demote, self.stats = Remote(self._evict), Remote(self._demote), Remote(self._stats)

    async def _evict(self, keys: list[bytes]) -> int:
        self.evicted += keys
        return 0

    async def _demote(self, keys: list[bytes]) -> tuple[list[int], str, dict[bytes, bytes]]:
        count, reason = self.demote_answer(keys)
        self.demoted += keys[:count]
        return [self.redis_bytes] * count, reason, {}

    async def _stats(self) -> dict[str, Any]:
        return {}


class FakeRedisTier:
    """Notes what it is told to evict."""

    def __init__(self) -> None:
        self.evicted: list[bytes] = []
        self.fails = False
        self.renewed: list[list[bytes]] = []
        self.missing: set[bytes] = set()
        self.evict, self.stats, self.renew = Remote(self._evict), Remote(self._stats), Remote(self._renew)

    async def _renew(self, keys: list[bytes]) -> list[bytes]:
        self.renewed.append(keys)
        return [key for key in keys if key in self.missing]

    async def _evict(self, keys: list[bytes]) -> int:
        if self.fails:
            raise RuntimeError("gone")
        self.evicted += keys
        return len(keys)

    async def _stats(self) -> dict[str, Any]:
        return {"version": "7"}


class World(SimpleNamespace):
    """A manager with one replica, one CPU tier and, once `attach_redis` was called, a Redis tier."""

    manager: KVManagerActor
    cpu: FakeCPUTier
    redis: FakeRedisTier

    async def attach_redis(self, segments: int = 100, spans: list[Any] | None = None) -> list[bytes]:
        await self.manager.register_redis(self.redis, REDIS_LIFE, "endpoint", segments * SEGMENT_BYTES)
        sizes = [SEGMENT_BYTES] * len(spans or [])
        kept = await self.manager.adopt_redis(REDIS_LIFE, spans or [], sizes, sizes, {})
        await self.manager.redis_indexed(REDIS_LIFE)
        return kept

    async def save(self, spans: list[Any]) -> None:
        offer = await self.manager.offer(REPLICA, NODE, offered(spans), SIZES)
        assert offer is not None
        granted = offer[1]
        assert len(await self.manager.commit(NODE, granted, [SEGMENT_BYTES] * len(granted))) == len(granted)

    async def planned(self, hashes: list[BlockHash]) -> list[str]:
        """The tiers of a plan's segments."""
        plan = await self.manager.plan(REPLICA, NODE, PlanQuery(hashes))
        assert plan is not None
        await self.manager.release([plan.lease_id])
        return [load.tier for load in plan.segments]

    async def in_redis(self, hashes: list[BlockHash]) -> int:
        return int((await self.manager.api("lookup", hashes))["redis"])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, patient: None) -> Callable[..., None]:
    """Runs a test's coroutine in a new world; clock-driven waits are short."""
    monkeypatch.setattr(actor, "EVERY_S", 0.02)
    monkeypatch.setattr(redis_copies, "PAUSE_S", 0.05)

    def run(test: Callable[[World], Awaitable[None]], cpu_segments: int = 8, **config: Any) -> None:
        async def main() -> None:
            manager = KVManagerActor(ManagerConfig(blocks_per_segment=4, **config), with_redis=True)
            made = World(manager=manager, cpu=FakeCPUTier(), redis=FakeRedisTier())
            await manager.register_tier(NODE, made.cpu, "cpu life", cpu_segments * SEGMENT_BYTES, [], [])
            await manager.register_replica(REPLICA, 0, NODE, [], EngineFacts(FINGERPRINT))
            await asyncio.wait_for(test(made), patience(PATIENCE_S))

        asyncio.run(main())

    return run


async def soon(holds: Callable[[], Any]) -> None:
    while True:
        held = holds()
        if await held if asyncio.iscoroutine(held) else held:
            return
        await asyncio.sleep(0.01)


def test_what_is_saved_is_copied_to_redis_in_the_background(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(1, 3)
        await it.attach_redis()
        await it.save(spans)
        await soon(lambda: it.in_redis(hashes))
        assert it.cpu.demoted == [span.key for span in spans]
        assert await it.planned(hashes) == ["cpu"] * 3, "the CPU tier is nearer"
        assert (await it.manager.api("stats"))["leases"] == 0

    world(check)


def test_nothing_is_copied_before_the_index_of_redis_is_complete(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(2, 2)
        await it.manager.register_redis(it.redis, REDIS_LIFE, "endpoint", 100 * SEGMENT_BYTES)
        await it.save(spans)
        await asyncio.sleep(0.1)
        assert it.cpu.demoted == []
        await it.manager.redis_indexed(REDIS_LIFE)
        await soon(lambda: it.in_redis(hashes))

    world(check)


def test_what_lies_in_redis_after_a_restart_is_planned(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(3, 3)
        assert await it.attach_redis(spans=spans) == [span.key for span in spans]
        assert await it.planned(hashes) == ["redis"] * 3

    world(check)


def test_a_lost_redis_is_planned_from_no_more_and_is_not_copied_to(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(4, 2)
        await it.attach_redis(spans=spans)
        await it.manager.redis_lost(REDIS_LIFE, "it hangs")
        assert await it.planned(hashes) == []
        assert (await it.manager.api("parts"))["redis"] == {"state": "it hangs", "indexing": False, "segments": 0}
        assert (await it.manager.redis_alive(REDIS_LIFE, "ok"))["known"] is False
        await it.save(spans)
        await asyncio.sleep(0.1)
        assert it.cpu.demoted == []
        await it.attach_redis(spans=spans)
        assert await it.in_redis(hashes) == 8

    world(check)


def test_a_copy_that_fails_leaves_nothing_behind_and_is_tried_later(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(5, 2)
        it.cpu.demote_answer = lambda keys: (0, "full")
        await it.attach_redis()
        await it.save(spans)
        await soon(lambda: not it.manager._demoter._tasks)
        stats = await it.manager.api("stats")
        assert (stats["leases"], stats["reservations"], await it.in_redis(hashes)) == (0, 0, 0)
        it.cpu.demote_answer = lambda keys: (len(keys), "")
        await it.planned(hashes)  # a use earns it another try
        await soon(lambda: it.in_redis(hashes))

    world(check)


def test_redis_is_charged_with_what_a_copy_takes_there_and_the_cpu_tier_with_all_of_it(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(7, 3)
        it.cpu.redis_bytes = SEGMENT_BYTES // 2
        await it.attach_redis()
        await it.save(spans)
        await soon(lambda: it.in_redis(hashes))
        held = {place["tier"]: place["bytes"] for place in (await it.manager.api("stats"))["locations"]}
        assert held == {"cpu": 3 * SEGMENT_BYTES, "redis": 3 * (SEGMENT_BYTES // 2)}
        await it.manager.api("clear", ["cpu"], 1.0)
        plan = await it.manager.plan(REPLICA, NODE, PlanQuery(hashes))
        assert plan is not None
        assert {(load.nbytes, load.raw_nbytes) for load in plan.segments} == {(SEGMENT_BYTES // 2, SEGMENT_BYTES)}
        await it.manager.prefetch(REPLICA, NODE, [span.key for span in spans])
        held = {place["tier"]: place["bytes"] for place in (await it.manager.api("stats"))["locations"]}
        assert held["cpu"] == 3 * SEGMENT_BYTES

    world(check)


def test_a_redis_that_misses_an_eviction_has_to_tell_again_what_it_holds(world: Any) -> None:
    async def check(it: World) -> None:
        _, spans = sequence(6, 1)
        await it.attach_redis(spans=spans)
        assert (await it.manager.redis_alive(REDIS_LIFE, "ok"))["known"]
        it.redis.fails = True
        await it.manager.api("clear", ["redis"], 1.0)
        assert (await it.manager.redis_alive(REDIS_LIFE, "ok"))["known"] is False

    world(check)


def test_clearing_redis_leaves_the_cpu_tier_alone(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(7, 2)
        await it.attach_redis()
        await it.save(spans)
        await soon(lambda: it.in_redis(hashes))
        assert await it.manager.api("clear", ["redis"], 1.0) == {"redis": 2}
        assert it.redis.evicted == [span.key for span in reversed(spans)]
        assert it.cpu.evicted == []
        assert await it.planned(hashes) == ["cpu"] * 2

    world(check)


def test_above_the_high_water_mark_the_coldest_leave_the_cpu_tier_once_redis_has_them(world: Any) -> None:
    async def check(it: World) -> None:
        await it.attach_redis()
        hashes, spans = sequence(8, 8)
        await it.save(spans)
        await soon(lambda: it.cpu.evicted == [spans[7].key])
        assert await it.planned(hashes) == ["cpu"] * 7 + ["redis"]

    world(check, cpu_segments=8, cpu_high_water=0.9)


def test_room_for_what_comes_from_redis_is_granted_and_can_be_committed(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(9, 2)
        await it.attach_redis(spans=spans)
        granted = await it.manager.prefetch(REPLICA, NODE, [span.key for span in spans])
        assert granted.save_id
        assert granted == PrefetchGrant(granted.save_id, tuple(span.key for span in spans))
        await it.manager.commit(NODE, spans, [SEGMENT_BYTES] * 2)
        assert await it.planned(hashes) == ["cpu"] * 2

    world(check)


def test_tiers_learn_from_the_manager_where_redis_is(world: Any) -> None:
    async def check(it: World) -> None:
        assert await it.manager.tier_alive(NODE, "cpu life", 0) == (True, None)
        await it.attach_redis()
        assert await it.manager.tier_alive(NODE, "cpu life", 0) == (True, "endpoint")

    world(check)


def test_redis_is_not_ok_before_a_prefetch_worker_is_ready(world: Any) -> None:
    async def check(it: World) -> None:
        await it.attach_redis()
        await it.manager.redis_alive(REDIS_LIFE, "ok")
        report = (await it.manager.api("parts"))["redis"]
        assert report["state"] != "ok"
        assert report["indexing"]
        await it.manager.tier_alive(NODE, "cpu life", 1)
        assert (await it.manager.api("parts"))["redis"] == {"state": "ok", "indexing": False, "segments": 0}

    world(check)


def test_the_redis_tier_learns_the_models_fingerprint_from_the_replicas(world: Any) -> None:
    async def check(it: World) -> None:
        assert await it.manager.redis_alive("x", "starting") == {"known": False, "fingerprint": FINGERPRINT}
        assert (await KVManagerActor(ManagerConfig(4), with_redis=True).redis_alive("x", "ok"))["fingerprint"] is None

    world(check)


# Renewals, and what Redis has lost.


def test_what_is_used_is_renewed_and_what_redis_lost_is_copied_there_once_more(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(40, 3)
        await it.attach_redis()
        await it.save(spans)
        await soon(lambda: len(it.cpu.demoted) == 3)
        it.redis.missing = {spans[0].key}

        async def renewed() -> bool:
            await it.planned(hashes)
            return any(len(keys) == 3 for keys in it.redis.renewed)

        await soon(renewed)
        assert [span.key for span in reversed(spans)] in it.redis.renewed
        await soon(lambda: len(it.cpu.demoted) >= 4)
        it.redis.missing = set()
        assert it.cpu.demoted[3] == spans[0].key
        await asyncio.sleep(0.05)
        assert await it.in_redis(hashes) == 12, "nothing was uprooted"
        assert it.redis.evicted == []
        assert (await it.manager.api("stats"))["counters"]["restored_segments"] >= 1

    world(check, redis_renew_s=0.05)


def test_what_redis_lost_and_no_cpu_tier_has_is_forgotten_with_what_hangs_on_it(world: Any) -> None:
    async def check(it: World) -> None:
        hashes, spans = sequence(41, 3)
        await it.attach_redis(spans=spans)
        it.redis.missing = {spans[1].key}
        await it.planned(hashes)
        await soon(lambda: it.redis.evicted)
        await soon(lambda: in_redis_is(it, hashes, 4))

    world(check, redis_renew_s=0.05)


async def in_redis_is(it: World, hashes: list[BlockHash], blocks: int) -> bool:
    return await it.in_redis(hashes) == blocks
