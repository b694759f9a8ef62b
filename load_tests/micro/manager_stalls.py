"""How long a plan waits while the manager does something to its whole index: the manager's actor, in this process.

The actor runs on an event loop here, with a tier that obeys at once; what would travel is pickled on the same thread,
as if Ray did it there. Meanwhile a plan is due every few milliseconds; its wait is counted from when it was due, so a
loop that is held up counts in full. `measure` runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from deployments.manager.actor import KVManagerActor
from kvmanager.config import ManagerConfig
from kvmanager.moves.plan import PlanQuery
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import split_segments
from load_tests.measuring.spread import percentile
from load_tests.micro.index_scale import PROMPT_SEGMENTS, SEGMENT_BLOCKS, SEGMENT_BYTES, prompts

NODE, REPLICA, LIFE = "node", "replica", "life"
PLAN_EVERY_S = 0.004
CLEAR_S = 600.0
PLANNED = 50
"""Prompts that are planned over and over."""


@dataclass(slots=True)
class Stall:
    """The waits of the plans that were due while something was done."""

    what: str
    segments: int
    took_s: float
    plans: int
    p50_ms: float
    worst_ms: float
    worst_cpu_ms: float
    """The longest wait without what other programs took of it: no more than the manager's processor time meanwhile."""


class _Tier:
    """Stands in for `handle.evict.remote(keys)` of a tier."""

    def __init__(self) -> None:
        self.evict = self
        self.evicted = 0

    def remote(self, keys: Any) -> Awaitable[int]:
        pickle.dumps(keys)
        self.evicted += len(keys)
        return self._answer(len(keys))

    async def _answer(self, count: int) -> int:
        await asyncio.sleep(0.001)
        return count


class _Scene:
    """A manager whose index holds `segments`: half of them below one root, half in prompts of their own."""

    def __init__(self, segments: int) -> None:
        self.segments = segments
        self.manager = KVManagerActor(ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS))
        self.tier = _Tier()
        self.root = BlockHash(random.Random("root").randbytes(32))
        self._planned: list[list[BlockHash]] = []

    async def fill(self) -> None:
        """Register the tier with all that it holds."""
        self._planned.clear()
        await self.manager.register_tier(NODE, self.tier, LIFE, 10**18, [], [])
        await self.manager.register_replica(REPLICA, 0, NODE, [], b"f" * 32)
        for number, (hashes, _) in enumerate(prompts(0, self.segments, PROMPT_SEGMENTS)):
            if number % 2:
                hashes[:SEGMENT_BLOCKS] = [self.root] * SEGMENT_BLOCKS
            spans = split_segments(hashes, 0, len(hashes), SEGMENT_BLOCKS, len(hashes))
            await self.manager.adopt_tier(NODE, LIFE, spans, [SEGMENT_BYTES] * len(spans), True)
            if number % 100 == 0:
                self._heartbeats()
                await asyncio.sleep(0)
                self.manager._garbage.set_aside(self.manager._brain.stats(0.0)["nodes"])  # as housekeeping does
            if number % max(1, self.segments // PROMPT_SEGMENTS // PLANNED) == 0:
                self._planned.append(hashes)

    async def stall(self, what: str, work: Callable[[], Awaitable[Any]]) -> Stall:
        """Plan while something is done."""
        waits: list[float] = []
        own: list[float] = []
        doing = asyncio.ensure_future(work())
        began = due = time.perf_counter()
        while not doing.done() or not waits:
            due += PLAN_EVERY_S
            self._heartbeats()
            cpu = time.thread_time()
            await asyncio.sleep(due - time.perf_counter())
            plan = await self.manager.plan(REPLICA, NODE, PlanQuery(self._planned[len(waits) % len(self._planned)]))
            now = time.perf_counter()
            waits.append(now - due)
            own.append(min(now - due, time.thread_time() - cpu))
            due = now
            if plan:
                await self.manager.release([plan.lease_id])
        took_s = time.perf_counter() - began
        await doing
        return Stall(
            what, self.segments, took_s, len(waits), percentile(waits, 50) * 1e3, max(waits) * 1e3, max(own) * 1e3
        )

    def _heartbeats(self) -> None:
        """Keep every replica and tier from being taken for gone, however long the work takes."""
        now = time.monotonic()
        states: list[Any] = [*self.manager._replicas.values(), *self.manager._tiers.cpu.values()]
        for state in states:
            state.last_seen = now

    async def clear(self) -> None:
        """All of the CPU tier."""
        await self.manager.api("clear", ["cpu"], CLEAR_S)

    async def uproot(self) -> None:
        """The tier has lost the root of half of the index."""
        await self.manager.lost("cpu", NODE, [SegmentKey(self.root)])
        await self._swept()

    async def lose(self) -> None:
        """The tier was started again, and is empty."""
        await self.manager.register_tier(NODE, self.tier, "next life", 10**18, [], [])
        await self._swept()

    async def snapshot(self) -> None:
        """A router that knows nothing learns all."""
        mirror = PlacementMirror(SEGMENT_BLOCKS)
        while True:
            deltas, *_ = await self.manager.deltas(mirror.position, 0.0)
            mirror.apply(pickle.loads(pickle.dumps(deltas)))
            if not deltas.more:
                return
            await asyncio.sleep(0)

    async def _swept(self) -> None:
        while self.manager._brain.sweeping:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


def measure(segments: int) -> list[Stall]:
    """Measure each kind of work on a full index of `segments`. For a fresh process."""
    return asyncio.run(_measure(segments))


async def _measure(segments: int) -> list[Stall]:
    scene = _Scene(segments)
    stalls = []
    for what, work in (
        ("snapshot for a router", scene.snapshot),
        ("loss of a root of half of them", scene.uproot),
        ("clear", scene.clear),
        ("loss of the tier", scene.lose),
    ):
        await scene.fill()
        stalls.append(await scene.stall(what, work))
    scene.manager._housekeeping.cancel()
    return stalls
