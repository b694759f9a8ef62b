"""A node's prefetch workers, as its CPU tier sees them: several side by side, bounded, behind a circuit breaker.

A long prefix is pulled from Redis by all workers at once, segment after segment along the sequence. Pulling must never
cost more than computing would: what cannot be asked for now (circuit open, too many bytes under way) is refused at
once, a worker that does not answer is replaced, and a Redis that fails several times in a row is left alone a while.

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

from deployments.prefetch_worker import start_worker
from deployments.redis_endpoint import RedisEndpoint
from kvmanager.circuit_breaker import CircuitBreaker

logger = logging.getLogger(__name__)

MOST_BYTES_IN_FLIGHT = 128 * 1024**2
"""Pulled, but neither owned within the tier's budget nor dropped: fits the headroom of Ray's object store."""
STUCK_S = 10.0
"""A worker answers within Redis's deadline. One that has not for so long is killed, and another takes its place."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A segment on its way from Redis. `ref` is to the sealed bytes, or to the reason why there are none (str)."""

    key: bytes
    nbytes: int
    ref: ray.ObjectRef[Any]
    worker: Any


class PrefetchPool:
    """See the module's docstring."""

    def __init__(self, app_name: str, node_id: str, workers: int) -> None:
        self._app_name = app_name
        self._node_id = node_id
        self._count = workers
        self._endpoint: RedisEndpoint | None = None
        self._workers: list[Any] = []
        self._starting: dict[Any, asyncio.Task[None]] = {}
        self._turn = itertools.count()
        self._breaker = CircuitBreaker()
        self._bytes_in_flight = 0
        self._pulls_in_flight = 0
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
        """Whether all workers that there shall be are ready."""
        return self.ready == self._count

    def pull(self, key: bytes, nbytes: int) -> Pull | None:
        """Begin to fetch a segment; None: not now. Everything that was begun must be awaited with `arrival`."""
        worker = self._next_worker()
        if worker is None or self._bytes_in_flight + nbytes > MOST_BYTES_IN_FLIGHT:
            self._fail("not_asked")
            return None
        if not self._breaker.allows(time.monotonic()):
            self._fail("circuit_open")
            return None
        self._bytes_in_flight += nbytes
        self._pulls_in_flight += 1
        return Pull(key, nbytes, worker.read.remote(key), worker)

    async def arrival(self, pull: Pull) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """The verified bytes of a pull; None when they did not come, which is counted by its reason."""
        try:
            answer = await asyncio.wait_for(pull.ref, STUCK_S)
        except TimeoutError:
            self._replace(pull.worker)
            answer = "worker_stuck"
        except ray.exceptions.RayActorError:
            self._replace(pull.worker)
            answer = "worker_lost"
        except ray.exceptions.RayError:  # the object, not the worker
            answer = "lost"
        finally:
            self._bytes_in_flight -= pull.nbytes
            self._pulls_in_flight -= 1
        if not isinstance(answer, str):
            self._breaker.succeeded()
            return answer
        self._fail(answer)
        if answer in ("unreachable", "worker_stuck", "worker_lost"):
            self._breaker.failed(time.monotonic())
        else:  # an answer, if not the wished one: the segment is at fault, not Redis
            self._breaker.succeeded()
        return None

    async def push(
        self, keys: Sequence[bytes], refs: Sequence[ray.ObjectRef[Any]], timeout_s: float
    ) -> tuple[int, str]:
        """Store segments in Redis, parents first: how many of the first are there now, and why not more ("": all)."""
        worker = self._next_worker()
        if worker is None:
            return 0, "no_worker"
        try:
            writing = worker.write.remote(list(keys), *refs)
            stored, reason = await asyncio.wait_for(writing, timeout_s)
        except TimeoutError:
            self._replace(worker)
            return 0, "worker_stuck"
        except ray.exceptions.RayActorError:
            self._replace(worker)
            return 0, "worker_lost"
        except ray.exceptions.RayError:  # a segment's object, not the worker
            return 0, "object_lost"
        self._demoted += stored
        return stored, reason

    def count_promoted(self, segments: int) -> None:
        """Note segments that the tier has kept."""
        self._promoted += segments

    def stats(self) -> dict[str, Any]:
        """For metrics and the control API."""
        return {
            "workers": self.ready,
            "pulls_in_flight": self._pulls_in_flight,
            "promoted": self._promoted,
            "demoted": self._demoted,
            "pull_failures": dict(self._failures),
            "redis_circuit": self._breaker.state.value,
            "redis_circuit_opened": self._breaker.opened,
        }

    def _next_worker(self) -> Any:
        """The worker whose turn it is; None while there is none, or all are being started."""
        well = [worker for worker in self._workers if worker not in self._starting]
        return well[next(self._turn) % len(well)] if well else None

    def _start(self, number: int, endpoint: RedisEndpoint) -> Any:
        """A new worker, of which nothing is asked before it is there: a call would wait for that."""
        worker = start_worker(self._app_name, self._node_id, number, endpoint)

        async def wait() -> None:
            with contextlib.suppress(ray.exceptions.RayError):
                await worker.__ray_ready__.remote()
            self._starting.pop(worker, None)

        self._starting[worker] = asyncio.get_running_loop().create_task(wait())
        return worker

    def _replace(self, worker: Any) -> None:
        """Start another worker in the place of one that is dead or stuck."""
        if worker in self._workers and self._endpoint is not None:
            ray.kill(worker)
            number = self._workers.index(worker)
            self._workers[number] = self._start(number, self._endpoint)

    def _fail(self, reason: str) -> None:
        self._failures[reason] += 1
        if self._failures[reason] == 1:
            logger.warning("a segment was not fetched from Redis: %s (counted from now on, logged once)", reason)
