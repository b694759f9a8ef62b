"""Plans and commits a second through the manager's actor, from several callers, by the size of its index.

Real: the actor, Ray between it and the callers (actors of their own processes), and the client that replicas use. Not
real: the CPU tier that the index says holds everything, for nothing is loaded.

One *plan+commit* is what a request asks of the manager: a plan for its prompt, all of which is stored; the release of
the plan's lease; and the commit of one new segment, for which room was granted before the clock started. Each caller
has a given number of them under way at once. `together`: the client as it is, which sends what waits in one call
(`deployments.protocol.call_batches`); `alone`: each in a call of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from deployments.manager.actor import KVManagerActor
from deployments.protocol.kv_port import OfferedBlocks
from deployments.protocol.manager_client import ManagerClient
from kvmanager.config import ManagerConfig
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.tiers import start_manager
from load_tests.measuring.spread import percentile
from load_tests.measuring.turns import turns
from load_tests.micro.index_scale import HERE, PROMPT_SEGMENTS, SEGMENT_BLOCKS, SEGMENT_BYTES, prompt, prompts

CALLERS = 4
RUN_S = 2.0
RESERVED = 4000
"""Commits that one caller can make in a run."""
PATIENCE_S = 300.0
APP = "bench"
FINGERPRINT = b"b" * 32
CONFIG = ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS, save_s=3600.0)


class FilledManager(KVManagerActor):
    """A manager that was told of its segments before the clock started."""

    async def fill(self, segments: int) -> None:
        """Index prompts of 128 segments at one node whose tier is never silent."""
        self._tiers.register_cpu(float("inf"), HERE.holder, None, "life", 10**18)
        for hashes, spans in prompts(0, segments, PROMPT_SEGMENTS):
            self._brain.adopt(0.0, HERE, spans, [SEGMENT_BYTES] * len(spans))
            self._garbage.set_aside(self._brain.stats(0.0)["nodes"])
            del hashes

    async def cpu_s(self) -> float:
        """Processor seconds of this process so far."""
        return time.process_time()


class Caller:
    """A process with requests of its own. An asyncio actor."""

    def __init__(self, number: int) -> None:
        self._replica = f"replica {number}"
        self._number = number
        self._client = ManagerClient(APP)
        self._prompts: list[list[BlockHash]] = []
        self._spans: list[SegmentSpan] = []
        self._latencies: list[float] = []
        self._runs = 0

    async def prepare(self, prompt_segments: int) -> None:
        """Register, choose prompts, and have room granted for what will be committed."""
        await self._ask("register_replica", self._replica, self._number, HERE.holder, [], FINGERPRINT)
        # Of the stored prompts the first ones; a block's hash counts only where a segment ends, but each is sent.
        chosen = list(prompts(0, 50 * PROMPT_SEGMENTS, PROMPT_SEGMENTS))[self._number :: CALLERS]
        filler = random.Random(self._number)
        self._prompts = [
            [hashes[i] if i % SEGMENT_BLOCKS == SEGMENT_BLOCKS - 1 else BlockHash(filler.randbytes(32))
             for i in range(prompt_segments * SEGMENT_BLOCKS)]
            for hashes, _ in chosen
        ]  # fmt: skip
        self._runs += 1
        rng = random.Random(f"{self._number} {self._runs}")
        self._spans = []
        for _ in range(RESERVED):
            hashes, _ = prompt(rng, 1)
            offered = OfferedBlocks(hashes, 0, len(hashes), len(hashes))
            answer = await self._ask("offer", self._replica, HERE.holder, offered, [SEGMENT_BYTES] * len(hashes))
            self._spans += answer[1]
        assert len(self._spans) == RESERVED
        self._latencies = []

    async def run(self, under_way: int, together: bool) -> tuple[int, float, list[float]]:
        """For `RUN_S`: how many plan+commits, in how many seconds, and each plan's latency."""
        began = time.perf_counter()
        await asyncio.gather(*(self._requests(under_way, lane, together, began + RUN_S) for lane in range(under_way)))
        return len(self._latencies), time.perf_counter() - began, self._latencies

    async def _requests(self, lanes: int, lane: int, together: bool, end: float) -> None:
        ask = self._ask if together else self._ask_alone
        for number in range(lane, RESERVED, lanes):
            began = time.perf_counter()
            if began > end:
                return
            hashes = self._prompts[number % len(self._prompts)]
            plan = await ask("plan", self._replica, HERE.holder, PlanQuery(hashes))
            planned = time.perf_counter() - began
            assert len(plan.segments) == len(hashes) // SEGMENT_BLOCKS
            span = self._spans[number]
            _, kept = await asyncio.gather(
                ask("release", [plan.lease_id]), ask("commit", HERE.holder, [span], [SEGMENT_BYTES])
            )
            assert kept == [span.key]
            self._latencies.append(planned)

    async def _ask(self, method: str, *args: Any) -> Any:
        return await self._client.ask(method, *args, timeout_s=PATIENCE_S)

    async def _ask_alone(self, method: str, *args: Any) -> Any:
        return await getattr(self._client.find(PATIENCE_S), method).remote(*args)


@dataclass(slots=True)
class CallScale:
    """One arm: `rates` are plan+commits a second, one of each round."""

    segments: int
    prompt_segments: int
    under_way: int
    """At each caller."""
    together: bool
    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """The actor's processor time for one, in each round."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "segments": self.segments,
            "prompt_segments": self.prompt_segments,
            "callers": CALLERS,
            "under_way_each": self.under_way,
            "together": self.together,
            "per_s": self.rates,
            "plan_p50_ms": percentile(self.latencies, 50) * 1e3,
            "plan_p99_ms": percentile(self.latencies, 99) * 1e3,
            "actor_cpu_us": self.cpu_us,
        }


def measure(segments: int, rounds: int, tell: Any) -> list[CallScale]:
    """All arms at one size of the index, alternating. Within `own_ray`; `tell` is called with what happens now."""
    arms = [
        CallScale(segments, prompt_segments, under_way, together)
        for prompt_segments, under_way in ((8, 1), (8, 16), (8, 64), (PROMPT_SEGMENTS, 16))
        for together in (True, False)
    ]
    manager = start_manager(APP, CONFIG, actor_class=FilledManager)
    callers = [ray.remote(num_cpus=0)(Caller).remote(number) for number in range(CALLERS)]
    try:
        tell(f"{segments} segments: the actor is filled")
        ray.get(manager.fill.remote(segments), timeout=PATIENCE_S)
        for turn in turns(arms, rounds):
            tell(f"{segments} segments: round {turn.round + 1}, {_name(turn.arm)}")
            _run(turn.arm, manager, callers)
    finally:
        for actor in (*callers, manager):
            ray.kill(actor)
    return arms


def _run(arm: CallScale, manager: Any, callers: list[Any]) -> None:
    ray.get([caller.prepare.remote(arm.prompt_segments) for caller in callers], timeout=PATIENCE_S)
    cpu_before = ray.get(manager.cpu_s.remote())
    runs = ray.get([caller.run.remote(arm.under_way, arm.together) for caller in callers], timeout=PATIENCE_S)
    cpu_s = ray.get(manager.cpu_s.remote()) - cpu_before
    done = sum(count for count, _, _ in runs)
    arm.rates.append(sum(count / seconds for count, seconds, _ in runs))
    arm.latencies += [latency for _, _, latencies in runs for latency in latencies]
    arm.cpu_us.append(cpu_s / done * 1e6)


def _name(arm: CallScale) -> str:
    return (
        f"{arm.prompt_segments}-segment prompts, {arm.under_way} under way, {'together' if arm.together else 'alone'}"
    )
