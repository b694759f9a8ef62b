"""Carries out the manager's directives at one replica: slices of `PoolControl`, one after the other, acknowledged.

On the replica's event loop. Each slice is a call to the engine thread, and the next is made only when the loop has
heard of the last one, so that the engine steps in between: a directive of any length adds one slice to a step. Two
lanes keep the order in which directives came: those that only keep books, and those that wait for transfers, one at a
time, so that they never take more than one of the load threads from requests.

Nothing here raises: a directive that cannot be carried out has an outcome that says so, which is counted.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Histogram

from deployments.engine.pool.block_owners import Owner
from deployments.engine.pool.control import MOST_BLOCKS, Onboarding, PoolControl
from kvmanager.moves.directives import (
    KINDS,
    DeviceDirective,
    DirectiveKind,
    DirectiveOrder,
    DirectiveResult,
    Evict,
    Offload,
    Onboard,
    Outcome,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 1.0
"""Time that a transfer may end after its deadline: the engine has to hear its thread first."""
TRANSFER_LANE = frozenset({DirectiveKind.OFFLOAD, DirectiveKind.ONBOARD})


_STEP_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


class StepTimes:
    """For how long directives hold up the engine: a histogram per kind, and the worst.

    On one event loop; `registry` and `worst` are for anyone to read.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.worst: dict[str, float] = {}
        """Seconds, by kind of directive."""
        self._seconds = Histogram(
            "crosskv_directive_step_seconds", "Time that a directive takes from the engine between two of its steps.",
            ["kind"], buckets=_STEP_SECONDS, registry=self.registry,
        )  # fmt: skip

    def observe(self, kind: str, seconds: float) -> None:
        """Note one slice of a directive."""
        self._seconds.labels(kind).observe(seconds)
        self.worst[kind] = max(seconds, self.worst.get(kind, 0.0))


@dataclass(slots=True)
class _Progress:
    """Progress of a directive."""

    segments: int = 0
    blocks: int = 0
    step_s: float = 0.0


class _RefusedError(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class DirectiveRunner:
    """See the module's docstring. `call` runs a function on the engine thread, between two steps."""

    def __init__(self, control: PoolControl, call: Callable[[Callable[[], Any]], Future[Any]]) -> None:
        self.counters: collections.Counter[tuple[str, str]] = collections.Counter()
        """Directives by kind and outcome."""
        self.times = StepTimes()
        self._control = control
        self._call = call
        self._lanes = {False: asyncio.Lock(), True: asyncio.Lock()}

    async def carry_out(self, order: DirectiveOrder) -> DirectiveResult:
        """Carry out one order of `deployments.manager.directive_sender`."""
        directive, kind = order.directive, KINDS[type(order.directive)]
        deadline = time.monotonic() + order.deadline_s
        done = _Progress()
        try:
            async with self._lanes[kind in TRANSFER_LANE]:
                if time.monotonic() >= deadline:
                    raise _RefusedError(Outcome.REFUSED_LATE)
                await self._run(directive, deadline, done)
            outcome = Outcome.DONE
        except _RefusedError as refusal:
            outcome = refusal.outcome
        except Exception:
            logger.exception("a directive of the KV manager failed: %s", kind.value)
            outcome = Outcome.FAILED
        if not self.counters[kind.value, outcome.value] and outcome is not Outcome.DONE:
            logger.info("a directive of the KV manager was not carried out: %s %s (counted)", kind.value, outcome.value)
        self.counters[kind.value, outcome.value] += 1
        return DirectiveResult(outcome, done.segments, done.blocks, done.step_s)

    async def _run(self, directive: DeviceDirective, deadline: float, done: _Progress) -> None:
        match directive:
            case Evict(keys=keys):
                await self._evict(keys, done)
            case Offload() | Onboard() if self._control.needs_requests:
                raise _RefusedError(Outcome.REFUSED_MODEL)
            case Offload(spans=spans):
                await self._offload(spans, deadline, done)
            case Onboard():
                await self._onboard(directive, deadline, done)

    async def _evict(self, hashes: Sequence[bytes], done: _Progress) -> None:
        for part in _parts(hashes, MOST_BLOCKS):
            done.blocks += await self._slice(DirectiveKind.EVICT, done, partial(self._control.evict, part))
        if not done.blocks:
            raise _RefusedError(Outcome.REFUSED_GONE)

    async def _offload(self, spans: Sequence[Any], deadline: float, done: _Progress) -> None:
        kind = DirectiveKind.OFFLOAD
        while spans:
            begun, blocks, future = await self._slice(kind, done, partial(self._control.offload, spans))
            if not begun:
                break
            if future is None:
                raise _RefusedError(Outcome.REFUSED_FULL)
            stored = await self._end(future, deadline)
            if stored is None:
                raise _RefusedError(Outcome.FAILED)
            done.segments += stored
            done.blocks += blocks
            spans = spans[begun:]
        if not done.blocks:
            raise _RefusedError(Outcome.REFUSED_GONE)

    async def _onboard(self, directive: Onboard, deadline: float, done: _Progress) -> None:
        control, kind, plan = self._control, DirectiveKind.ONBOARD, directive.plan
        loads = plan.segments
        hashes = directive.hashes[: loads[-1].end_block]
        scores = list(_per_block(plan.scores, plan.now, len(hashes)))
        onboarding = Onboarding(hashes, loads, scores, deadline, Owner(directive.tenant))
        position = 0
        if not await self._slice(kind, done, partial(control.hear, plan.epoch, plan.now)):
            raise _RefusedError(Outcome.REFUSED_LATE)
        while position < len(hashes):
            reached = await self._slice(kind, done, partial(control.reach, onboarding, position))
            if reached > position:
                position = reached
                continue
            if time.monotonic() >= deadline:
                raise _RefusedError(Outcome.REFUSED_LATE)
            future = await self._slice(kind, done, partial(control.onboard, onboarding, position))
            if future is None:
                raise _RefusedError(Outcome.REFUSED_FULL)
            end = await self._end(future, deadline)
            if end == position:
                raise _RefusedError(Outcome.REFUSED_LATE if time.monotonic() >= deadline else Outcome.FAILED)
            done.blocks += end - position
            done.segments += sum(position < load.end_block <= end for load in loads)
            position = end

    async def _slice(self, kind: DirectiveKind, done: _Progress, function: Callable[[], T]) -> T:
        """Run one slice on the engine thread and note how long it held up the engine."""
        took = 0.0

        def timed() -> T:
            nonlocal took
            began = time.perf_counter()
            try:
                return function()
            finally:
                took = time.perf_counter() - began

        try:
            return await asyncio.wrap_future(self._call(timed))
        finally:
            done.step_s = max(done.step_s, took)
            self.times.observe(kind.value, took)

    async def _end(self, future: Future[T], deadline: float) -> T:
        """The result of a transfer, which ends by itself around its deadline; the blocks are given back by it."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic()) + GRACE_S):
                # Shielded: the transfer thread will set the result, late or not.
                return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            raise _RefusedError(Outcome.REFUSED_LATE) from None


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _per_block(scores: Sequence[tuple[int, float]], now: float, blocks: int) -> Iterator[float]:
    """The score of each block: of its segment, but nothing is colder than what is used now."""
    known = iter(scores)
    end_block, score = next(known, (blocks, now))
    for number in range(blocks):
        while number >= end_block:
            end_block, score = next(known, (blocks, now))
        yield max(score, now)
