"""A node's prefetch workers, as its CPU tier sees them: several side by side, bounded, behind a circuit breaker.

A long prefix is pulled from Redis by several workers at once, segment after segment along the sequence. By how many,
`kvmanager.loading.fan_out` says. Pulling must never cost more than computing would: what cannot be asked for now
(circuit open, too many bytes under way) is refused at once, a worker that does not answer is replaced, and a Redis that
fails several times in a row is left alone a while.

Everything here runs on the tier's event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from deployments.cpu_tier.prefetch_worker import UNREACHABLE, start_worker
from deployments.segment_store.endpoint import RedisEndpoint
from kvmanager.circuit_breaker import CircuitBreaker, CircuitState
from kvmanager.loading.fan_out import assign, workers_for
from kvmanager.segments.sizes import MOST_BYTES_IN_FLIGHT

logger = logging.getLogger(__name__)

STUCK_S = 10.0
"""A worker that brings nothing for this long is killed and replaced. It reads one segment after the other, so the time
runs from its previous answer, however much it was asked for at once."""

_WORKER_GONE = ("worker_stuck", "worker_lost")
"""Counts against Redis once for each worker, however much it had been asked for."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A segment on its way from Redis. `ref` is to the sealed bytes, or to the reason why there are none (str)."""

    key: bytes
    nbytes: int
    ref: ray.ObjectRef[Any]
    worker: Any
    answer: asyncio.Task[Any]
    """The object that `ref` refers to."""

    @property
    def failed(self) -> bool:
        """Whether it has come to nothing already."""
        return self.answer.done() and isinstance(self.answer.result(), str)


class PrefetchPool:
    """See the module's docstring."""

    def __init__(self, app_name: str, node_id: str, workers: int) -> None:
        self._app_name = app_name
        self._node_id = node_id
        self._count = workers
        self._endpoint: RedisEndpoint | None = None
        self._workers: list[Any] = []
        self._starting: set[Any] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._last_answer: dict[Any, float] = {}
        """By worker that has something to bring: when it brought something last."""
        self._room = asyncio.Event()
        """Set whenever there may be room for more."""
        self._queued_bytes: collections.Counter[Any] = collections.Counter()
        """By worker: what it has been asked for and has not brought yet."""
        self._turn = itertools.count()
        self._breaker = CircuitBreaker()
        self._bytes_in_flight = 0
        self._pulls_in_flight = 0
        self._pulled_bytes = 0
        self._loads_by_workers: collections.Counter[int] = collections.Counter()
        self._late = 0
        self._promoted = 0
        self._demoted = 0
        self._failures: collections.Counter[str] = collections.Counter()

    def connect(self, endpoint: RedisEndpoint | None) -> None:
        """Work with this Redis from now on; None: with none."""
        if endpoint == self._endpoint:
            return
        for worker in self._workers:
            ray.kill(worker)
        self._starting.clear()
        self._endpoint = endpoint
        self._breaker = CircuitBreaker()
        self._workers = [] if endpoint is None else [self._start(number, endpoint) for number in range(self._count)]

    @property
    def ready(self) -> int:
        """Workers that can be asked."""
        return len(self._workers) - len(self._starting)

    @property
    def settled(self) -> bool:
        """Whether all configured workers are ready."""
        return self.ready == self._count

    def pull(self, segments: Sequence[tuple[bytes, int]], avoid: Any = None) -> list[Pull]:
        """Begin to fetch segments (key, size in bytes; parents first), not by the worker `avoid`, which is late.

        Returns as many of the first as can be asked for now. Each must be awaited with `arrival`.
        """
        workers = [worker for worker in self.ready_workers() if worker is not avoid]
        sizes = [nbytes for _, nbytes in segments]
        room = MOST_BYTES_IN_FLIGHT - self._bytes_in_flight
        fitting = sum(total <= room for total in itertools.accumulate(sizes))
        if not fitting and sizes and self._fits(sizes[0]):
            fitting = 1
        if not workers or fitting < len(segments):
            self._fail("not_asked")
        if not workers or not fitting:
            return []
        if not self._breaker.allows(time.monotonic()):
            self._fail("circuit_open")
            return []
        if self._breaker.state is not CircuitState.CLOSED:
            fitting = 1  # a probe
        sizes = sizes[:fitting]
        share = workers_for(sum(sizes), len(sizes), len(workers))
        self._loads_by_workers[share] += 1
        chosen = assign(sizes, [self._queued_bytes[worker] for worker in workers], share)
        return [
            self._pull(key, nbytes, workers[index])
            for (key, nbytes), index in zip(segments[:fitting], chosen, strict=True)
        ]

    async def room_for(self, nbytes: int, timeout_s: float) -> None:
        """Wait until a segment may be pulled, up to `timeout_s`, if it is larger than half of
        `MOST_BYTES_IN_FLIGHT`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s if nbytes > MOST_BYTES_IN_FLIGHT // 2 else 0):
                while not self._fits(nbytes):
                    self._room.clear()
                    await self._room.wait()

    def _fits(self, nbytes: int) -> bool:
        """Whether `nbytes` may be pulled now: within `MOST_BYTES_IN_FLIGHT`, or alone."""
        return not self._bytes_in_flight or self._bytes_in_flight + nbytes <= MOST_BYTES_IN_FLIGHT

    def count_late(self, segments: int) -> None:
        """Note segments that were asked of another worker again, because theirs was late."""
        self._late += segments

    async def arrival(self, pull: Pull) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """The verified bytes of a pull; None when they did not come, which is counted by its reason."""
        try:
            answer = await pull.answer
        finally:
            self._bytes_in_flight -= pull.nbytes
            self._room.set()
            self._pulls_in_flight -= 1
        return None if isinstance(answer, str) else answer

    async def push(
        self, keys: Sequence[bytes], refs: Sequence[ray.ObjectRef[Any]], timeout_s: float
    ) -> tuple[list[int], str, dict[bytes, bytes]]:
        """See `PrefetchWorker.write`: what the first take in Redis, why not all do ("": all), forms but dense ones."""
        workers = self.ready_workers()
        if not workers:
            return [], "no_worker", {}
        worker = workers[next(self._turn) % len(workers)]
        try:
            writing = worker.write.remote(list(keys), *refs)
            stored, reason, forms = await asyncio.wait_for(writing, timeout_s)
        except TimeoutError:
            self._replace(worker)
            return [], "worker_stuck", {}
        except ray.exceptions.RayActorError:
            self._replace(worker)
            return [], "worker_lost", {}
        except ray.exceptions.RayError:  # a segment's object, not the worker
            return [], "object_lost", {}
        self._demoted += len(stored)
        return stored, reason, forms

    def count_promoted(self, segments: int) -> None:
        """Note segments that the tier has kept."""
        self._promoted += segments

    def stats(self) -> dict[str, Any]:
        """For metrics and the control API."""
        return {
            "workers": self.ready,
            "pulls_in_flight": self._pulls_in_flight,
            "pulled_bytes": self._pulled_bytes,
            "late_pulls": self._late,
            "loads_by_workers": dict(self._loads_by_workers),
            "promoted": self._promoted,
            "demoted": self._demoted,
            "pull_failures": dict(self._failures),
            "redis_circuit": self._breaker.state.value,
            "redis_circuit_opened": self._breaker.opened,
        }

    def _pull(self, key: bytes, nbytes: int, worker: Any) -> Pull:
        self._bytes_in_flight += nbytes
        self._pulls_in_flight += 1
        self._queued_bytes[worker] += nbytes
        ref = worker.read.remote(key)
        answer = asyncio.get_running_loop().create_task(self._answer(ref, nbytes, worker))
        return Pull(key, nbytes, ref, worker, answer)

    async def _answer(self, ref: Any, nbytes: int, worker: Any) -> Any:
        """Return a worker's answer to a pull, or why there is none; counted."""
        replaced = False
        try:
            answer = await self._brought(ref, worker)
        except TimeoutError:
            replaced = self._replace(worker)
            answer = "worker_stuck"
        except ray.exceptions.RayActorError:
            replaced = self._replace(worker)
            answer = "worker_lost"
        except ray.exceptions.RayError:  # the object, not the worker
            answer = "lost"
        self._queued_bytes[worker] -= nbytes
        self._last_answer[worker] = time.monotonic()
        if not self._queued_bytes[worker]:
            del self._queued_bytes[worker], self._last_answer[worker]
        came = not isinstance(answer, str)
        if came:
            self._pulled_bytes += nbytes
        else:
            self._fail(answer)
        if replaced or (not came and answer == UNREACHABLE):
            self._breaker.failed(time.monotonic())
        elif came or answer not in _WORKER_GONE:  # an answer, if not the wished one: the segment is at fault, not Redis
            self._breaker.succeeded()
        return answer

    async def _brought(self, ref: Any, worker: Any) -> Any:
        """Return a worker's answer. Raises TimeoutError when it has brought nothing at all for `STUCK_S`, RayError."""
        asked = time.monotonic()
        answer = asyncio.ensure_future(ref)
        while True:
            since = max(asked, self._last_answer.get(worker, asked))
            await asyncio.wait([answer], timeout=since + STUCK_S - time.monotonic())
            if answer.done():
                return answer.result()
            if self._last_answer.get(worker, asked) <= since:
                answer.cancel()
                raise TimeoutError

    def ready_workers(self) -> list[Any]:
        """Return the workers that can be asked."""
        return [worker for worker in self._workers if worker not in self._starting]

    def _start(self, number: int, endpoint: RedisEndpoint) -> Any:
        """A new worker, of which nothing is asked before it is there: a call would wait for that."""
        worker = start_worker(self._app_name, self._node_id, number, endpoint)

        async def watch() -> None:
            try:
                await worker.__ray_ready__.remote()
            except ray.exceptions.RayError:
                return  # the next call that asks it replaces it: one that cannot start is not started over and over
            finally:
                self._starting.discard(worker)
            with contextlib.suppress(ray.exceptions.RayError):
                await worker.live.remote()
            self._replace(worker)  # now, not when the next load asks it

        self._starting.add(worker)
        task = asyncio.get_running_loop().create_task(watch())
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        return worker

    def _replace(self, worker: Any) -> bool:
        """Start another worker in the place of one that is dead or stuck; False: that has been done."""
        endpoint = self._endpoint
        if endpoint is None or worker not in self._workers:
            return False
        ray.kill(worker)
        number = self._workers.index(worker)
        self._workers[number] = self._start(number, endpoint)
        return True

    def _fail(self, reason: str) -> None:
        self._failures[reason] += 1
        if self._failures[reason] == 1:
            logger.warning("a segment was not fetched from Redis: %s (counted from now on, logged once)", reason)
