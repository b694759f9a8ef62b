"""The pool's own rules, with workers that answer what the test wants. Real workers: `test_three_tiers`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from deployments import prefetch_pool
from deployments.prefetch_pool import MOST_BYTES_IN_FLIGHT, PrefetchPool

KEY = b"k" * 32
OBJECT_LOST = ray.exceptions.ObjectLostError("00" * 28, "", "")
WORKER_DIED = ray.exceptions.ActorDiedError()


class Worker:
    """Answers every call with `answer`, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.read = self.write = self.__ray_ready__ = SimpleNamespace(remote=self._call)
        self._answer = answer

    async def _call(self, *args: Any) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Makes a pool of one worker with this answer; `started` and `killed` note what becomes of its workers."""

    def make(answer: Any) -> Any:
        pool: Any = PrefetchPool("app", "node", 1)
        pool.started, pool.killed = [], []

        def start(*args: Any) -> Worker:
            pool.started.append(Worker(answer))
            return pool.started[-1]  # type: ignore[no-any-return]

        monkeypatch.setattr(prefetch_pool, "start_worker", start)
        monkeypatch.setattr(prefetch_pool.ray, "kill", pool.killed.append)
        return pool

    return make


async def connected(pool: Any) -> None:
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
        stored, reason = await pool.push([KEY], ["ref"], 1.0)
        assert (stored, bool(reason)) == (0, True)
        assert (len(pool.killed), len(pool.started)) == (replaced, 1 + replaced)

    asyncio.run(check())


def test_no_more_is_pulled_at_once_than_the_object_store_has_room_for(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of(np.zeros(8, np.uint8))
        await connected(pool)
        first = pool.pull(KEY, MOST_BYTES_IN_FLIGHT)
        assert pool.pull(KEY, 1) is None
        assert await pool.arrival(first) is not None
        second = pool.pull(KEY, 1)
        assert second is not None
        await pool.arrival(second)
        assert pool.stats()["pulls_in_flight"] == 0

    asyncio.run(check())


def test_a_redis_that_fails_three_times_is_not_asked_a_fourth_time(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of("unreachable")
        await connected(pool)
        for _ in range(3):
            assert await pool.arrival(pool.pull(KEY, 1)) is None
        assert pool.pull(KEY, 1) is None
        assert pool.stats()["redis_circuit"] == "open"

    asyncio.run(check())


def test_a_segment_that_is_missing_says_nothing_against_redis(pool_of: Any) -> None:
    async def check() -> None:
        pool = pool_of("missing")
        await connected(pool)
        for _ in range(5):
            assert await pool.arrival(pool.pull(KEY, 1)) is None
        assert pool.stats()["redis_circuit"] == "closed"
        assert pool.stats()["pull_failures"] == {"missing": 5}

    asyncio.run(check())
