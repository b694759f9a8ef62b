"""The manager's actor on a loop of this process: who waits for whom, and who is forgotten when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from kv_cluster import FINGERPRINT, SEGMENT_BYTES, SIZES, offered, sequence

from deployments.manager import actor, replica_state
from deployments.manager import tier_registry as tier_seats
from deployments.manager.actor import KVManagerActor
from deployments.manager.tier_registry import EvictionQueue
from deployments.protocol.engine_facts import EngineFacts
from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import NOTHING_SEEN, Position
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.moves.directives import Clear, DirectiveResult, Outcome
from kvmanager.moves.plan import PlanQuery
from kvmanager.routing.mirror import PlacementMirror
from load_tests.harness.patience import PATIENCE_S, patience

NODE, REPLICA = "node", "replica"


class FakeTier:
    """Stands in for a tier's actor handle: `handle.evict.remote(keys)`."""

    def __init__(self) -> None:
        self.evicted: list[bytes] = []
        self.answers = True
        self.fails = False
        self.evict = self.stats = self

    def remote(self, keys: Any = ()) -> Awaitable[int]:
        self.evicted += keys
        return self._answer(len(keys))

    async def _answer(self, count: int) -> int:
        while not self.answers:  # noqa: ASYNC110 - a test sets it
            await asyncio.sleep(0.01)
        if self.fails:
            raise RuntimeError("broken in this test")
        return count


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch, patient: None) -> Callable[..., None]:
    """Runs a test's coroutine with a manager that has one replica and one tier; its clock-driven waits are short."""
    monkeypatch.setattr(actor, "EVERY_S", 0.02)

    def run(test: Callable[[KVManagerActor, FakeTier], Awaitable[None]], segments: int = 4, **config: Any) -> None:
        async def main() -> None:
            manager = KVManagerActor(ManagerConfig(blocks_per_segment=4, **config))
            tier = FakeTier()
            await manager.register_tier(NODE, tier, "first life", segments * SEGMENT_BYTES, [], [])
            await manager.register_replica(REPLICA, 0, NODE, [], EngineFacts(FINGERPRINT))
            await asyncio.wait_for(test(manager, tier), patience(PATIENCE_S))
            manager._housekeeping.cancel()

        asyncio.run(main())

    return run


async def save(manager: KVManagerActor, spans: list[Any]) -> list[bytes]:
    """Keys that the manager let the tier keep."""
    offer = await manager.offer(REPLICA, NODE, offered(spans), SIZES)
    if offer is None:
        return []
    return await manager.commit(NODE, offer[1], [SEGMENT_BYTES] * len(offer[1]))


async def soon(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110 - nothing announces what housekeeping does
        await asyncio.sleep(0.01)


def test_an_unregistered_replica_is_told_to_register(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        assert await manager.take_directives("stranger", 1.0) is None
        assert await manager.plan("stranger", NODE, PlanQuery([])) is None

    managed(check)


def test_a_replicas_last_words_make_the_manager_forget_it_at_once_and_are_counted(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        await manager.replica_ends(REPLICA, "hung")
        await manager.replica_ends(REPLICA, "hung")  # of one that is not known any more
        assert (await manager.api("parts"))["replicas"] == {}
        assert await manager.plan(REPLICA, NODE, PlanQuery([])) is None
        assert (await manager.api("stats"))["replicas_ended"] == {"dead": 0, "hung": 2}

    managed(check)


def test_clear_returns_when_every_replica_has_acknowledged(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        await manager.register_replica("second", 1, NODE, [], EngineFacts(FINGERPRINT))
        clearing = asyncio.create_task(manager.api("clear", ["device"], 10.0))
        first = (await manager.take_directives(REPLICA, 1.0) or [])[0]
        second = (await manager.take_directives("second", 1.0) or [])[0]
        assert first.directive == second.directive == Clear()
        await manager.acknowledge(first.number, DirectiveResult(Outcome.DONE, blocks=7))
        await asyncio.sleep(0.02)
        assert not clearing.done()
        await manager.acknowledge(second.number, DirectiveResult(Outcome.DONE, blocks=5))
        assert await clearing == {"device": {"0": 7, "1": 5}}

    managed(check)


def test_a_tenants_clear_names_the_tenant_to_every_part_and_leaves_what_others_have(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        (hashes, own), (others_hashes, others) = sequence(21, 2), sequence(22, 2)
        await save(manager, [replace(span, tenant="a" * 16) for span in own])
        await save(manager, [replace(span, tenant="b" * 16) for span in others])
        clearing = asyncio.create_task(manager.api("clear", ["cpu", "device"], 10.0, "a" * 16))
        order = (await manager.take_directives(REPLICA, 1.0) or [])[0]
        assert order.directive == Clear("a" * 16)
        await manager.acknowledge(order.number, DirectiveResult(Outcome.DONE, blocks=3))
        assert await clearing == {"cpu": 2, "device": {"0": 3}}
        assert tier.evicted == [span.key for span in reversed(own)]
        stats = await manager.api("tenant_stats", "b" * 16)
        assert stats["tiers"]["cpu"]["segments"] == 2
        assert (await manager.api("tenant_stats", "a" * 16))["tiers"]["cpu"]["segments"] == 0
        assert (await manager.api("lookup", hashes))["cpu"] == 0 < (await manager.api("lookup", others_hashes))["cpu"]

    managed(check)


def test_clear_does_not_wait_longer_than_its_deadline(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        assert await manager.api("clear", ["device"], 0.05) == {"device": {"0": None}}
        assert manager._directives._clears == set()

    managed(check)


def test_clearing_the_cpu_tier_evicts_children_first_and_all_of_it(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        hashes, spans = sequence(1, 3)
        await save(manager, spans)
        assert await manager.api("clear", ["cpu"], 1.0) == {"cpu": 3}
        assert tier.evicted == [span.key for span in reversed(spans)]
        assert await planned(manager, hashes) == []

    managed(check)


def test_leases_delay_an_eviction_until_they_are_released(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        hashes, spans = sequence(2, 1)
        await save(manager, spans)
        plans = [await manager.plan(REPLICA, NODE, PlanQuery(hashes)) for _ in range(2)]
        leases = [plan.lease_id for plan in plans if plan]
        await manager.api("clear", ["cpu"], 1.0)
        assert tier.evicted == []
        await manager.release(leases[:1])
        await asyncio.sleep(0.1)
        assert tier.evicted == []
        await manager.release(leases[1:])
        await soon(lambda: _is(tier.evicted == [spans[0].key]))

    managed(check)


async def planned(manager: KVManagerActor, hashes: Any) -> list[bytes]:
    """The segments of a plan, whose lease lasts."""
    plan = await manager.plan(REPLICA, NODE, PlanQuery(hashes))
    assert plan is not None
    return [load.key for load in plan.segments]


async def _is(value: bool) -> bool:
    return value


def test_a_bad_segment_leaves_the_index_and_the_tier_and_may_be_saved_anew(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        hashes, spans = sequence(3, 3)
        await save(manager, spans)
        await manager.bad_segment("cpu", NODE, spans[1].key)
        await manager._tiers.settled(Location(Tier.CPU, NODE))
        assert set(tier.evicted) == {spans[1].key, spans[2].key}, "what hangs on it cannot be reached any more"
        assert await planned(manager, hashes) == [spans[0].key]
        assert await save(manager, spans) == [span.key for span in spans[1:]]

    managed(check)


def test_room_is_promised_only_when_the_tier_has_made_it(managed: Any, late_tiers: None) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        await save(manager, sequence(4, 4)[1])
        hashes, spans = sequence(5, 2)
        for _ in range(2000):
            await manager.plan(REPLICA, NODE, PlanQuery(hashes))  # by then the stored ones are cold
        tier.answers = False
        assert await manager.offer(REPLICA, NODE, offered(spans), SIZES) is None
        await soon(lambda: _is(len(tier.evicted) == 2))
        assert (await manager.api("stats"))["reservations"] == 0

    managed(check)


def test_a_tier_that_failed_at_an_eviction_must_tell_again_what_it_holds(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        assert (await manager.tier_alive(NODE, "first life", 0))[0]
        await save(manager, sequence(6, 1)[1])
        tier.fails = True
        await manager.api("clear", ["cpu"], 1.0)
        assert not (await manager.tier_alive(NODE, "first life", 0))[0]

    managed(check)


def test_a_tier_that_is_slow_keeps_its_seat_and_is_given_nothing_until_it_has_evicted(
    managed: Any, late_tiers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        spans = sequence(6, 1)[1]
        await save(manager, spans)
        tier.answers = False
        assert await manager.api("clear", ["cpu"], 0.2) == {"cpu": 1}
        assert await save(manager, spans) == [], "the eviction of its first copy would take the new one"
        assert (await manager.tier_alive(NODE, "first life", 0))[0]
        tier.answers = True
        monkeypatch.setattr(tier_seats, "ANSWER_S", PATIENCE_S)
        assert await manager._tiers.settled(Location(Tier.CPU, NODE))
        assert await save(manager, spans) == [spans[0].key]

    managed(check)


def test_what_redis_is_to_evict_does_not_hold_up_a_save_in_a_cpu_tier(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        manager._tiers._redis = tier_seats.RedisState(None, "", 0.0, EvictionQueue(None, lambda error: None))
        redis, spans = FakeTier(), sequence(7, 2)[1]
        await manager.register_redis(redis, "life", None, 10 * SEGMENT_BYTES)  # type: ignore[arg-type]
        await manager.adopt_redis("life", spans, [SEGMENT_BYTES] * 2, [SEGMENT_BYTES] * 2, {})
        redis.answers = False
        manager._brain._due.add(manager._brain._catalog.uproot(next(iter(_copies(manager))), bytes_lost=False))
        assert await save(manager, sequence(8, 1)[1]) == [sequence(8, 1)[1][0].key]
        while not redis.evicted:  # noqa: ASYNC110 - it is ordered in a task of its own
            await asyncio.sleep(0.01)
        assert redis.evicted == [spans[1].key]

    managed(check)


def _copies(manager: KVManagerActor) -> Any:
    """Redis's, the last of a chain first."""
    return manager._brain._catalog.store(REDIS).copies()


def test_a_restarted_tier_is_not_the_one_that_was_known(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        assert (await manager.tier_alive(NODE, "first life", 0))[0]
        assert not (await manager.tier_alive(NODE, "second life", 0))[0]

    managed(check)


def test_a_silent_replica_is_forgotten_with_its_device_and_leases(
    managed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        hashes, spans = sequence(7, 2)
        await save(manager, spans)
        await manager.report_placement(REPLICA, [(hashes, [], False)])
        await manager.plan(REPLICA, NODE, PlanQuery(hashes))
        assert (await manager.api("lookup", hashes))["device"] == {"0": 8}

        monkeypatch.setattr(replica_state, "SILENCE_S", 0.2)
        await soon(lambda: _gone(manager))

        assert (await manager.api("lookup", hashes))["device"] == {}
        assert (await manager.api("stats"))["leases"] == 0

    managed(check)


async def _gone(manager: KVManagerActor) -> bool:
    return (await manager.api("parts"))["replicas"] == {}


def test_a_silent_tiers_segments_are_not_planned(managed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        hashes, spans = sequence(8, 2)
        await save(manager, spans)

        async def nothing_planned() -> bool:
            return await planned(manager, hashes) == []

        assert not await nothing_planned()
        monkeypatch.setattr(tier_seats, "TIER_SILENCE_S", 0.2)
        await soon(nothing_planned)
        assert await manager.offer(REPLICA, NODE, offered(spans), SIZES) is None

    managed(check)


def test_a_silent_predecessor_is_forgotten_when_a_successor_reports_its_rank(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        hashes, _ = sequence(9, 1)
        await manager.report_placement(REPLICA, [(hashes, [], False)])
        manager._replicas[REPLICA].last_seen -= replica_state.MISSED_POLLS_S + 1
        await manager.register_replica("successor", 0, NODE, hashes[:2], EngineFacts(FINGERPRINT))
        assert (await manager.api("lookup", hashes))["device"] == {"0": 2}
        assert await manager.take_directives(REPLICA, 1.0) is None

    managed(check)


def test_two_replicas_that_report_one_rank_do_not_forget_each_other(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        hashes, _ = sequence(9, 1)
        await manager.report_placement(REPLICA, [(hashes, [], False)])
        await manager.register_replica("replacement", 0, NODE, hashes[:2], EngineFacts(FINGERPRINT))
        for _ in range(3):
            for name in (REPLICA, "replacement"):
                assert await manager.take_directives(name, 0.0, 0) == []
        assert manager._brain.offloads.device_blocks(REPLICA, hashes) == len(hashes)
        # A number means the one that was heard of last.
        assert (await manager.api("lookup", hashes))["device"] == {"0": 2}
        assert (await manager.api("stats"))["replicas"] == {"0": "replacement"}

    managed(check)


def test_a_replica_that_serve_renumbers_is_called_by_its_new_number(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        polling = asyncio.create_task(
            manager.deltas(Position((await manager.deltas(NOTHING_SEEN, 0.0))[0].last), 3600.0)
        )
        await asyncio.sleep(0)
        assert await manager.take_directives(REPLICA, 0.0, 5) == []
        assert (await polling)[1] == {REPLICA: 5}, "routers hear of it at once"
        assert (await manager.api("parts"))["replicas"][REPLICA][0] == 5

    managed(check)


def test_a_router_that_waits_for_changes_is_woken_by_each_kind(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        mirror = PlacementMirror(4)
        hashes, spans = sequence(10, 2)

        async def heard(change: Awaitable[Any]) -> tuple[int, int, int]:
            mirror.apply((await manager.deltas(mirror.position, 0.0))[0])
            polling = asyncio.create_task(manager.deltas(mirror.position, 3600.0))
            await asyncio.sleep(0)
            await change
            deltas, ranks, *_ = await polling
            while not deltas.events:  # woken a little early
                deltas, ranks, *_ = await manager.deltas(mirror.position, 3600.0)
            assert mirror.apply(deltas)
            assert ranks == {REPLICA: 0}
            return mirror.coverage(hashes, REPLICA)

        assert await heard(save(manager, spans)) == (0, 8, 0)
        assert await heard(manager.report_placement(REPLICA, [(hashes[:4], [], False)])) == (4, 4, 0)
        assert await heard(manager.report_placement(REPLICA, [([], [], True)])) == (0, 8, 0)
        assert await heard(manager.lost("cpu", NODE, [spans[1].key])) == (0, 4, 0)
        assert await heard(manager.api("clear", ["cpu"], 1.0)) == (0, 0, 0)

    managed(check)


def test_a_poll_ends_empty_when_nothing_changes(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: FakeTier) -> None:
        seen = (await manager.deltas(NOTHING_SEEN, 0.0))[0].last
        deltas, *_ = await manager.deltas(Position(seen), 0.05)
        assert deltas.events == []

    managed(check)


def test_a_replica_that_computes_otherwise_is_named_in_the_log(
    managed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(manager: KVManagerActor, tier: FakeTier) -> None:
        await manager.register_replica("second", 1, NODE, [], EngineFacts(FINGERPRINT))
        assert "computes otherwise" not in caplog.text
        await manager.register_replica("third", 2, NODE, [], EngineFacts(bytes(32)))
        assert "replica third computes otherwise" in caplog.text

    managed(test)
