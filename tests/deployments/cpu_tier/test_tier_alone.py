"""The CPU tier in this process, under a manager that records what it is told: what it keeps, refuses and brings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_cluster import SEGMENT_BYTES, sealed, sequence

from deployments.cpu_tier import actor as cpu_tier
from deployments.cpu_tier.actor import USUAL_TIMES, CPUTier, TierTimes
from deployments.cpu_tier.prefetch_pool import Pull
from deployments.protocol.kv_port import PrefetchGrant
from deployments.protocol.manager_client import ManagerUnavailableError
from kvmanager.segments.spans import SegmentSpan

pytestmark = pytest.mark.server


class Manager:
    """Wants every segment but those it is `refusing`, unless `unavailable`. Grants promotions if `granting` an id, too
    late if `slow`, and wants what is `above` them too."""

    def __init__(self) -> None:
        self.unavailable = False
        self.granting = 0
        self.slow = False
        self.above: list[SegmentSpan] = []
        self.refusing: set[bytes] = set()
        self.told: list[tuple[Any, ...]] = []

    async def ask(self, method: str, *args: Any, timeout_s: float, late: Any = None) -> Any:
        if self.unavailable:
            raise ManagerUnavailableError("gone")
        if method == "prefetch":
            above = wanted(self.above)
            keys = [*(key for key, _ in above), *args[2]]
            granted = PrefetchGrant(self.granting, keys, above) if self.granting else PrefetchGrant()
            if self.slow:
                asyncio.get_running_loop().call_soon(late, granted)
                raise ManagerUnavailableError("late")
            return granted
        return [span.key for span in args[1] if span.key not in self.refusing] if method == "commit" else (True, None)

    def tell(self, *message: Any) -> None:
        self.told.append(message)


@pytest.fixture
def in_process(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test's coroutine with a tier of two segments' room and its manager."""
    manager = Manager()
    monkeypatch.setattr(cpu_tier, "ManagerClient", lambda app_name: manager)

    def run(
        test: Callable[[CPUTier, Manager, list[SegmentSpan]], Awaitable[None]],
        times: TierTimes = USUAL_TIMES,
    ) -> None:
        async def main() -> None:
            tier = CPUTier("app", "node", 2 * SEGMENT_BYTES, 0, times)
            await test(tier, manager, sequence(50, 3)[1])
            tier._heartbeat.cancel()

        asyncio.run(main())

    return run


def test_what_exceeds_the_budget_is_refused_by_the_tier_itself(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        assert await tier.put(spans, *sealed(spans)) == 2
        stats = await tier.stats()
        assert (stats["segments"], stats["refused"]) == (2, 1)
        assert stats["used_bytes"] == stats["budget_bytes"] == 2 * SEGMENT_BYTES

    in_process(check)


def test_an_eviction_gives_its_bytes_back_once(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:2], *sealed(spans[:2]))
        assert await tier.evict([spans[1].key]) == SEGMENT_BYTES
        assert await tier.evict([spans[1].key]) == 0
        assert (await tier.stats())["used_bytes"] == SEGMENT_BYTES
        assert await tier.put(spans[2:], *sealed(spans[2:])) == 1

    in_process(check)


def test_a_segment_put_twice_is_held_and_counted_once(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:1], *sealed(spans[:1]))
        await tier.put(spans[:1], *sealed(spans[:1]))
        assert (await tier.stats())["used_bytes"] == SEGMENT_BYTES

    in_process(check)


def test_without_a_manager_nothing_new_is_kept(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:1], *sealed(spans[:1]))
        manager.unavailable = True
        assert await tier.put(spans[1:2], *sealed(spans[1:2])) == 0
        assert (await tier.stats())["segments"] == 1

    in_process(check)


def test_what_was_dropped_before_its_commit_is_not_committed(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:2], *sealed(spans[:2]))
        await tier.evict([spans[0].key])
        assert await tier._commit(spans[:2]) == 1
        assert await tier._commit(spans[:1]) == 0

    in_process(check)


class Pool:
    """Brings every segment at once; what `held` names only when the test lets it. `avoided` notes whom it kept off."""

    def __init__(self, spans: Sequence[SegmentSpan]) -> None:
        self.bytes_of = dict(zip([span.key for span in spans], sealed(spans), strict=True))
        self.failing: set[bytes] = set()
        self.held: set[bytes] = set()
        self.gate = asyncio.Event()
        self.asked: list[list[bytes]] = []
        self.avoided: list[Any] = []
        self.late = self.promoted = 0
        self.worker = object()
        self.ready, self.settled = 1, True

    async def room_for(self, nbytes: int, patience_s: float) -> None:
        pass

    def ready_workers(self) -> list[Any]:
        return []

    def pull(self, segments: Sequence[tuple[bytes, int]], avoid: Any = None) -> list[Pull]:
        self.asked.append([key for key, _ in segments])
        self.avoided.append(avoid)
        number = len(self.asked)
        return [
            Pull(
                key, nbytes, f"ref {number} {key.hex()}", self.worker,
                asyncio.get_running_loop().create_task(self._answer(key, number)),
            )
            for key, nbytes in segments
        ]  # type: ignore[arg-type]  # fmt: skip

    async def _answer(self, key: bytes, number: int) -> Any:
        if key in self.held and number == 1:
            await self.gate.wait()
        return "missing" if key in self.failing else self.bytes_of[key]

    async def arrival(self, pull: Pull) -> Any:
        answer = await pull.answer
        return None if isinstance(answer, str) else answer

    def count_promoted(self, segments: int) -> None:
        self.promoted += segments

    def count_late(self, segments: int) -> None:
        self.late += segments

    def connect(self, endpoint: Any) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


def wanted(spans: Sequence[SegmentSpan]) -> list[tuple[bytes, int]]:
    return [(span.key, SEGMENT_BYTES) for span in spans]


async def end_of_promotions(tier: CPUTier) -> None:
    await asyncio.gather(*tier._tasks)


def test_a_promotion_that_is_under_way_is_joined(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        tier._redis = pool = Pool(spans)  # type: ignore[assignment]
        first = await tier.prefetch("replica", wanted(spans[:2]))
        second = await tier.prefetch("replica", wanted(spans))
        assert second[:2] == first
        assert pool.asked == [[spans[0].key, spans[1].key], [spans[2].key]]
        await end_of_promotions(tier)

    in_process(check)


def test_a_promotion_that_has_failed_is_begun_anew(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        tier._redis = pool = Pool(spans)  # type: ignore[assignment]
        pool.held, pool.failing = {spans[0].key}, {spans[1].key}
        await tier.prefetch("replica", wanted(spans[:2]))
        await asyncio.sleep(0.01)
        refs = await tier.prefetch("replica", wanted(spans[:2]))
        assert pool.asked[1] == [spans[1].key]
        assert [str(ref)[:5] for ref in refs] == ["ref 1", "ref 2"]
        pool.gate.set()
        await end_of_promotions(tier)
        assert tier._pulls == {}

    in_process(check)


def test_what_a_late_worker_has_not_brought_is_asked_of_others(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        tier._redis = pool = Pool(spans)  # type: ignore[assignment]
        pool.held = {spans[0].key, spans[2].key}
        await tier.prefetch("replica", wanted(spans))
        await asyncio.sleep(0.01)  # the second has come
        refs = await tier.prefetch("replica", wanted(spans), late=spans[0].key)
        assert [str(ref)[:5] for ref in refs] == ["ref 2", "ref 1", "ref 2"]
        assert (pool.avoided, pool.late) == ([None, pool.worker], 2)
        pool.gate.set()
        await end_of_promotions(tier)
        assert tier._pulls == {}

    in_process(check)


def test_room_for_a_promotion_that_the_manager_wants_no_more_is_given_back(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        tier._redis = pool = Pool(spans)  # type: ignore[assignment]
        manager.granting = 7
        manager.refusing = {spans[1].key}
        await tier.prefetch("replica", wanted(spans[:2]))
        await end_of_promotions(tier)
        assert pool.promoted == 1
        assert manager.told == [("abandon", 7)]
        assert (await tier.stats())["segments"] == 1

    in_process(check)


@pytest.mark.parametrize("granting", [7, 0])
def test_room_for_a_promotion_that_is_granted_too_late_is_given_back(in_process: Any, granting: int) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        tier._redis = Pool(spans)  # type: ignore[assignment]
        manager.granting, manager.slow = granting, True
        await tier.prefetch("replica", wanted(spans[:2]))
        await end_of_promotions(tier)
        assert manager.told == ([("abandon", 7)] if granting else [])
        assert (await tier.stats())["segments"] == 0

    in_process(check)


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_promotion_follows_on_is_kept_too_and_nothing_without_it(in_process: Any, comes: bool) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        tier._redis = pool = Pool(spans)  # type: ignore[assignment]
        manager.granting, manager.above = 7, spans[:1]
        pool.failing = set() if comes else {spans[0].key}
        await tier.prefetch("replica", wanted(spans[1:2]))
        await end_of_promotions(tier)
        assert pool.asked == [[spans[1].key], [spans[0].key]]
        assert list(tier._segments) == ([spans[0].key, spans[1].key] if comes else [])
        assert (pool.promoted, manager.told) == ((2, []) if comes else (0, [("abandon", 7)]))
        assert tier._pulls == {}

    in_process(check)


def test_whatever_goes_wrong_with_a_promoted_segment_none_stays_under_way(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        awaited: list[bytes] = []

        class Broken(Pool):
            async def arrival(self, pull: Pull) -> Any:
                awaited.append(pull.key)
                if pull.key == spans[0].key:
                    raise RuntimeError("broken in this test")
                return await super().arrival(pull)

        tier._redis = pool = Broken(spans)  # type: ignore[assignment]
        pool.bytes_of[spans[1].key] = np.zeros(SEGMENT_BYTES, np.uint8)  # whose header cannot be read
        manager.granting = 7
        await tier.prefetch("replica", wanted(spans))
        await end_of_promotions(tier)
        assert awaited == [span.key for span in spans]
        assert tier._pulls == {}
        assert manager.told == [("abandon", 7)]

    in_process(check)


def test_a_manager_that_fails_at_a_promotion_leaves_nothing_under_way(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        async def fail(*args: Any, timeout_s: float) -> Any:
            raise TypeError("an answer of another shape")

        tier._redis = Pool(spans)  # type: ignore[assignment]
        manager.ask = fail  # type: ignore[method-assign]
        await tier.prefetch("replica", wanted(spans))
        await end_of_promotions(tier)
        assert tier._pulls == {}

    in_process(check)


def test_a_tier_ends_without_a_manager_but_not_while_a_replica_wants_it(
    in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, killed = [0.0], list[Any]()
    times = TierTimes(first_heartbeat_s=0.0)
    monkeypatch.setattr(cpu_tier, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(cpu_tier.ray, "kill", lambda actor, no_restart: killed.append(actor))
    monkeypatch.setattr(CPUTier, "_address", lambda self: self)

    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        manager.unavailable = True
        tier._redis.__class__ = type("Unsettled", (type(tier._redis),), {"settled": False})
        for _ in range(5):
            now[0] += 0.7 * times.orphan_s
            await tier.wanted()
            for _ in range(10):
                await asyncio.sleep(0)
        assert killed == []
        now[0] += 1.1 * times.orphan_s
        await tier._heartbeat
        assert killed == [tier]

    in_process(check, times)
