"""The pool's own rules, with workers that answer what the test wants. Real workers: `test_three_tiers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from deployments.cpu_tier import prefetch_pool
from deployments.cpu_tier.prefetch_pool import STUCK_S, PrefetchPool
from kvmanager.segments.sizes import MOST_BYTES_IN_FLIGHT

KEY = b"k" * 32
MIB = 1 << 20
OBJECT_LOST = ray.exceptions.ObjectLostError("00" * 28, "", "")
WORKER_DIED = ray.exceptions.ActorDiedError()


class Worker:
    """Answers every call with `answer`, or raises it; `gate` holds its answers back. `asked` notes the keys read."""

    def __init__(self, answer: Any) -> None:
        self.read = SimpleNamespace(remote=self._read)
        self.write = self.__ray_ready__ = SimpleNamespace(remote=self._call)
        self.live = SimpleNamespace(remote=self._live)
        self.died = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[bytes] = []
        self.turns: Any = None
        self._answer = answer

    def _read(self, key: bytes) -> Any:
        self.asked.append(key)
        return self._call()

    async def _live(self) -> None:
        if not isinstance(self._answer, Exception):
            await self.died.wait()
        raise WORKER_DIED

    async def _call(self, *args: Any) -> Any:
        await self.gate.wait()
        if self.turns is not None:
            return await next(self.turns)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a pool of workers with this answer; `started` and `killed` note what becomes of them."""

    def make(answer: Any, workers: int = 1) -> Any:
        pool: Any = PrefetchPool("app", "node", workers)
        pool.started, pool.killed = [], []

        def start(*args: Any) -> Worker:
            pool.started.append(Worker(answer))
            return pool.started[-1]  # type: ignore[no-any-return]

        monkeypatch.setattr(prefetch_pool, "start_worker", start)
        monkeypatch.setattr(prefetch_pool.ray, "kill", pool.killed.append)
        return pool

    return make


async def connected(pool: Any) -> None:
    """The workers are ready."""
    pool.connect("endpoint")
    await asyncio.sleep(0)  # the worker is ready
    await asyncio.sleep(0)


@pytest.mark.parametrize(("error", "replaced"), [(OBJECT_LOST, 0), (WORKER_DIED, 1)])
def test_a_dead_worker_is_replaced_and_one_that_met_a_lost_object_is_not(
    pool_of: Any, error: Exception, replaced: int
) -> None:
    async def check() -> None:
        pool = pool_of(error)
        await connected(pool)
        stored, reason, _ = await pool.push([KEY], ["ref"], 1.0)
        assert (stored, bool(reason)) == ([], True)
        assert (len(pool.killed), len(pool.started)) == (replaced, 1 + replaced)

    asyncio.run(check())


def segments(count: int, nbytes: int = MIB) -> list[tuple[bytes, int]]:
    return [(bytes([number]) * 32, nbytes) for number in range(count)]


async def bring(pool: Any, wanted: list[tuple[bytes, int]]) -> list[Any]:
    """What has come of a load."""
    return [await pool.arrival(pull) for pull in pool.pull(wanted)]


def test_an_idle_workers_death_is_noticed_without_asking_it(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8), 2)
        await connected(pool)
        dead, well = pool.started
        dead.died.set()
        for _ in range(10):  # until its successor is there
            await asyncio.sleep(0)
        assert pool.killed == [dead]
        assert len(await bring(pool, segments(4))) == 4
        assert dead.asked == []
        assert len(well.asked) + len(pool.started[2].asked) == 4

    asyncio.run(check())


def test_a_worker_that_cannot_start_is_not_started_over_and_over(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(WORKER_DIED)
        await connected(pool)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(pool.started) == 1
        assert await bring(pool, segments(1)) == [None]
        assert len(pool.started) == 2

    asyncio.run(check())


def test_no_more_is_pulled_at_once_than_the_object_store_has_room_for(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8))
        await connected(pool)
        first, second = pool.pull(segments(3, MOST_BYTES_IN_FLIGHT // 2))
        assert pool.pull(segments(1, 1)) == []
        assert pool.stats()["pull_failures"] == {"not_asked": 2}
        assert await pool.arrival(first) is not None
        assert await pool.arrival(second) is not None
        assert len(await bring(pool, segments(1, 1))) == 1
        assert pool.stats()["pulls_in_flight"] == 0

    asyncio.run(check())


def test_segments_larger_than_the_budget_go_through_one_at_a_time(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8))
        await connected(pool)
        wanted = segments(2, MOST_BYTES_IN_FLIGHT + 1)
        (first,) = pool.pull(wanted)
        assert pool.pull(wanted[1:]) == [], "not beside the first"
        waits = asyncio.create_task(pool.room_for(wanted[1][1], 60.0))
        await asyncio.sleep(0)
        assert not waits.done()
        assert await pool.arrival(first) is not None
        await waits
        assert len(await bring(pool, wanted[1:])) == 1

    asyncio.run(check())


def test_nobody_waits_long_for_a_turn_and_small_segments_do_not_wait_at_all(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8))
        await connected(pool)
        (first,) = pool.pull(segments(1, MOST_BYTES_IN_FLIGHT))
        await pool.room_for(MIB, 3600.0)
        await pool.room_for(MOST_BYTES_IN_FLIGHT, 0.0)
        assert pool.pull(segments(1)) == []
        assert await pool.arrival(first) is not None

    asyncio.run(check())


def test_a_worker_that_brings_one_segment_after_the_other_is_not_stuck_however_many_wait(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8))
        await connected(pool)
        clock = SlowClock(monkeypatch)
        pulls = pool.pull(segments(6))
        answers = [asyncio.get_running_loop().create_future() for _ in pulls]
        pool.started[0].turns = iter(answers)
        for answer in answers:  # each well within the time, the last long after it
            await clock.passes(0.6 * STUCK_S)
            assert pool.killed == []
            answer.set_result(np.zeros(8, np.uint8))
        assert [await pool.arrival(pull) is not None for pull in pulls] == [True] * 6
        late = pool.pull(segments(1))
        pool.started[0].turns = iter([asyncio.get_running_loop().create_future()])
        await clock.passes(0.6 * STUCK_S)
        await clock.passes(0.6 * STUCK_S)
        assert pool.killed == [pool.started[0]]
        assert await pool.arrival(late[0]) is None

    asyncio.run(check())


class SlowClock:
    """The time that the pool sees: it stands still, but for `passes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now, self._until = 1000.0, asyncio.Event()
        monkeypatch.setattr(prefetch_pool, "time", SimpleNamespace(monotonic=lambda: self._now))
        self._wait = asyncio.wait
        monkeypatch.setattr(prefetch_pool.asyncio, "wait", self._wait_by_this_clock)

    async def passes(self, seconds: float) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        self._now += seconds
        self._until.set()
        for _ in range(20):
            await asyncio.sleep(0)

    async def _wait_by_this_clock(self, awaited: Any, *, timeout: float) -> Any:  # noqa: ASYNC109 - as asyncio.wait
        ends = self._now + timeout
        while self._now < ends and not any(each.done() for each in awaited):
            self._until.clear()
            tick = asyncio.ensure_future(self._until.wait())
            await self._wait([tick, *awaited], return_when=asyncio.FIRST_COMPLETED)
            tick.cancel()
        return {each for each in awaited if each.done()}, set()


def test_a_redis_that_fails_three_times_is_not_asked_a_fourth_time(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of("unreachable")
        await connected(pool)
        for _ in range(3):
            assert await bring(pool, segments(1)) == [None]
        assert pool.pull(segments(1)) == []
        assert pool.stats()["redis_circuit"] == "open"

    asyncio.run(check())


def test_a_redis_that_has_failed_is_tried_with_one_segment(pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        pool = pool_of("unreachable")
        await connected(pool)
        assert await bring(pool, segments(3)) == [None] * 3
        passed = time.monotonic() + 3600
        monkeypatch.setattr(prefetch_pool.time, "monotonic", lambda: passed)
        pool.started[0]._answer = np.zeros(8, np.uint8)
        assert len(await bring(pool, segments(3))) == 1
        assert len(await bring(pool, segments(3))) == 3

    asyncio.run(check())


def test_a_segment_that_is_missing_says_nothing_against_redis(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of("missing")
        await connected(pool)
        for _ in range(5):
            assert await bring(pool, segments(1)) == [None]
        assert pool.stats()["redis_circuit"] == "closed"
        assert pool.stats()["pull_failures"] == {"missing": 5}

    asyncio.run(check())


def test_a_load_goes_around_all_workers_along_the_sequence(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8), 3)
        await connected(pool)
        wanted = segments(6)
        await bring(pool, wanted)
        keys = [key for key, _ in wanted]
        assert [worker.asked for worker in pool.started] == [keys[0::3], keys[1::3], keys[2::3]]
        stats = pool.stats()
        assert (stats["loads_by_workers"], stats["pulled_bytes"]) == ({3: 1}, 6 * MIB)

    asyncio.run(check())


def test_a_small_load_takes_one_worker_and_the_next_one_another_while_that_is_busy(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8), 2)
        await connected(pool)
        both = [*pool.pull(segments(2, 1000)), *pool.pull(segments(1, 1000))]
        assert [len(worker.asked) for worker in pool.started] == [2, 1]
        for pull in both:
            await pool.arrival(pull)

    asyncio.run(check())


def test_a_load_can_be_kept_off_a_worker_that_is_late(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8), 3)
        await connected(pool)
        slow = pool.started[1]
        slow.gate.clear()
        pulls = pool.pull(segments(3))
        again = pool.pull(segments(2), avoid=slow)
        assert [len(worker.asked) for worker in pool.started] == [2, 1, 2]
        slow.gate.set()
        for pull in [*pulls, *again]:
            assert await pool.arrival(pull) is not None

    asyncio.run(check())


def test_a_pool_of_one_late_worker_asks_nobody_else(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8))
        await connected(pool)
        (pull,) = pool.pull(segments(1))
        assert pool.pull(segments(1), avoid=pool.started[0]) == []
        await pool.arrival(pull)

    asyncio.run(check())


def test_a_stuck_worker_is_replaced_and_its_bytes_are_no_longer_queued(
    pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8), 2)
        await connected(pool)
        monkeypatch.setattr(prefetch_pool, "STUCK_S", 0.01)
        pool.started[0].gate.clear()
        found = await bring(pool, segments(4))
        assert [each is None for each in found] == [True, False, True, False]
        assert pool.killed == [pool.started[0]]
        assert len(pool.started) == 3
        assert pool.stats()["pull_failures"] == {"worker_stuck": 2}
        assert not pool._queued_bytes

    asyncio.run(check())


def test_a_dead_worker_counts_once_against_redis_however_much_it_had_to_fetch(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8), 2)
        await connected(pool)
        pool.started[0]._answer = WORKER_DIED
        found = await bring(pool, segments(10))
        assert sum(each is None for each in found) == 5
        assert pool.stats()["redis_circuit"] == "closed"
        assert pool.killed == [pool.started[0]]

    asyncio.run(check())
