"""How a router's mirror follows the manager: gaps, new managers, answers with and without credits, metrics."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deployments.protocol import memory
from deployments.protocol.manager_client import ManagerUnavailableError
from deployments.router import placement_feed
from deployments.router.metrics import RouterMetrics, router_families, router_metrics
from deployments.router.placement_feed import MOVE_DEADLINE_S, PlacementFeed
from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import Deltas, Event, Part
from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import ALL_REPLICAS
from kvmanager.manager import KVManager
from kvmanager.moves.directives import Move
from kvmanager.routing.spreading import Spread
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import MARK_BYTES

BLOCKS = [BlockHash(bytes([number]) * 32) for number in range(8)]
KEY = SegmentKey(bytes(32))
MOVE = Spread(tuple(BLOCKS), "a", "b")


class ManagerStub:
    """Answers `deltas` from a real index, once per `answers` permit, and notes what it is told."""

    def __init__(self) -> None:
        self.brain = KVManager(ManagerConfig(1, max_deltas=4), epoch=1)
        self.extra: tuple[Any, ...] = ()
        self.told: list[tuple[Any, ...]] = []
        self.gone = False
        self.permits = asyncio.Semaphore(0)

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        await self.permits.acquire()
        if self.gone:
            raise ManagerUnavailableError("gone in this test")
        return (self.brain.deltas_since(args[0], 100), {"a": 0}, *self.extra)

    def tell(self, method: str, *args: Any) -> None:
        if self.gone:
            raise ManagerUnavailableError("gone in this test")
        self.told.append((method, *args))


class Following:
    """A feed, the manager it follows, and the change of its metrics since the start."""

    def __init__(self, manager: ManagerStub, feed: PlacementFeed) -> None:
        self.manager = manager
        self.feed = feed
        self._before = figures()

    async def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.manager.permits.release()
            for _ in range(5):
                await asyncio.sleep(0)

    def counted(self, name: str) -> float:
        return figures()[name] - self._before[name]

    def held(self) -> int:
        return self.feed.mirror.coverage(BLOCKS, "a").device


def figures() -> dict[str, float]:
    return {
        sample.name.removeprefix("crosskv_router_").removesuffix("_total")
        + "".join(sample.labels.values()): sample.value
        for family in router_families()
        for sample in family.samples
    }


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Following], Any]], None]:
    """Runs a test's coroutine with a feed on a loop of its own."""

    def run(test: Callable[[Following], Any]) -> None:
        async def main() -> None:
            manager = ManagerStub()
            monkeypatch.setattr(placement_feed, "ManagerClient", lambda app_name: manager)
            monkeypatch.setattr(placement_feed, "RETRY_S", 0.0)
            monkeypatch.setattr(placement_feed, "PAUSE_S", 0.0)
            router_metrics()
            await test(Following(manager, PlacementFeed("chat", 1)))

        asyncio.run(main())

    return run


def test_events_are_applied_in_order_and_counted(follow: Any) -> None:
    async def check(following: Following) -> None:
        await following.poll()
        following.manager.brain.device_stored("a", BLOCKS[:3])
        following.manager.brain.device_stored("a", BLOCKS[3:5])
        await following.poll()
        assert following.held() == 5
        assert following.feed.ranks == {"a": 0}
        assert following.counted("index_events") == 2
        assert following.counted("resyncs") == 0

    follow(check)


def test_a_feed_that_missed_events_fetches_the_whole_placement(follow: Any) -> None:
    async def check(following: Following) -> None:
        await following.poll()
        for block in BLOCKS:  # twice what the manager's log keeps
            following.manager.brain.device_stored("a", [block])
        await following.poll()
        assert following.held() == len(BLOCKS)

    follow(check)


def test_a_gap_in_the_numbers_is_a_resync_that_keeps_the_last_view_meanwhile(follow: Any) -> None:
    async def check(following: Following) -> None:
        following.manager.brain.device_stored("a", BLOCKS[:3])
        await following.poll()
        following.feed.hear(Deltas(1, first=5, last=5, events=[("dev0", "a")]), {"a": 0})
        assert following.counted("resyncs") == 1
        assert following.held() == 3
        following.manager.brain.device_stored("a", BLOCKS[3:4])
        await following.poll(2)
        assert following.held() == 4

    follow(check)


def test_a_mirror_that_has_grown_is_set_aside_while_its_snapshot_still_comes(
    follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(memory, "GROWTH", 4)

    async def check(following: Following) -> None:
        monkeypatch.setattr(gc, "freeze", lambda: frozen.append(following.feed.mirror.segments))
        segments: list[Event] = [("seg+", "cpu", "node", KEY, 0, bytes([number]) * MARK_BYTES) for number in range(8)]
        for part in (Part(7, 0, False, segments[:4]), Part(7, 1, False, segments[4:6]), Part(7, 2, True, segments[6:])):
            following.feed.hear(Deltas(1, 1, 0, [], part), {})
        assert frozen == [4, 8]
        for part in (Part(8, 0, False, segments[:4]), Part(8, 1, True, segments[4:])):  # a new manager's
            following.feed.hear(Deltas(2, 1, 0, [], part), {})
        assert frozen == [4, 8, 12]
        assert following.feed.mirror.segments == 8

    follow(check)


def test_a_new_manager_is_followed_from_its_beginning(follow: Any) -> None:
    async def check(following: Following) -> None:
        following.manager.brain.device_stored("a", BLOCKS[:3])
        await following.poll()
        following.manager.brain = KVManager(ManagerConfig(1), epoch=2)
        following.manager.brain.device_stored("a", BLOCKS[:1])
        following.manager.brain.device_stored("a", BLOCKS[1:2])
        await following.poll(3)
        assert following.held() == 2
        assert following.counted("resyncs") == 1

    follow(check)


def test_a_manager_that_is_gone_costs_nothing_but_a_count(follow: Any) -> None:
    async def check(following: Following) -> None:
        following.manager.brain.device_stored("a", BLOCKS[:3])
        await following.poll()
        following.manager.gone = True
        await following.poll(3)
        assert following.held() == 3
        assert following.counted("failed_polls") >= 1
        following.manager.gone = False
        following.manager.brain.device_stored("a", BLOCKS[3:4])
        await following.poll(2)
        assert following.held() == 4

    follow(check)


def test_after_an_answer_changes_gather_before_the_next_question(follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(following: Following) -> None:
        monkeypatch.setattr(placement_feed, "PAUSE_S", 60.0)
        await following.poll(2)
        assert not following.manager.permits.locked(), "the second question is not asked yet"

    follow(check)


def test_an_answer_may_bring_credits_or_not(follow: Any) -> None:
    async def check(following: Following) -> None:
        await following.poll()
        assert following.feed.credits == {}
        following.manager.extra = ({ALL_REPLICAS: {"cpu": 0.8, "tape": 0.1}, "a": {"redis": 7.0}},)
        await following.poll(2)
        assert following.feed.credits == {ALL_REPLICAS: {Tier.CPU: 0.8}, "a": {Tier.REDIS: 1.0}}
        assert figures()["creditcpu"] == 0.8

    follow(check)


def test_a_move_is_told_to_the_manager_and_lost_without_one(follow: Any) -> None:
    async def check(following: Following) -> None:
        following.feed.order(MOVE)
        assert following.manager.told == [("api", "move", Move("a", "b", BLOCKS), MOVE_DEADLINE_S)]
        following.manager.gone = True
        following.feed.order(MOVE)
        following.manager.tell = None  # type: ignore[assignment,method-assign]
        following.feed.order(MOVE)
        assert following.counted("moves") == 3
        assert following.counted("lost_moves") == 2

    follow(check)


def test_the_age_of_the_mirror_counts_from_the_last_whole_answer() -> None:
    now, registry = [0.0], CollectorRegistry()
    metrics = RouterMetrics(registry, clock=lambda: now[0])
    now[0] = 7.0
    assert registry.get_sample_value("crosskv_router_mirror_age_seconds") == 7.0
    metrics.mirror_is_whole()
    now[0] = 9.0
    assert registry.get_sample_value("crosskv_router_mirror_age_seconds") == 2.0


def test_a_full_page_leaves_the_mirror_as_old_as_it_was(follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(following: Following) -> None:
        whole: list[None] = []
        monkeypatch.setattr(router_metrics(), "mirror_is_whole", lambda: whole.append(None))
        await following.poll()
        assert len(whole) == 1
        events = [("dev+", "a", [block]) for block in BLOCKS[:3]]
        following.feed.hear(Deltas(1, 1, 2, events[:2], more=True), {})
        assert len(whole) == 1
        following.feed.hear(Deltas(1, 3, 3, events[2:]), {})
        assert len(whole) == 2

    follow(check)
