"""A manager is killed while a CPU tier and Redis hold its segments: how long until a new one knows them all.

Real: both managers, the CPU tier's actor with its registration, the Redis tier with a redis-server, the client. Not
real: the segments' bytes, in the CPU tier one object for all, in Redis 1 KB each; and Serve, which would start the new
manager: here it is started at once. A prober asks for plans all the while, as a replica does, and compares each plan
with what the tiers hold.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from deployments.cpu_tier.actor import CPUTier, tier_name
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.manager_client import SERVE_NAMESPACE, ManagerClient, ManagerUnavailableError
from deployments.redis_tier.actor import RedisTier, RedisTierConfig
from deployments.redis_tier.entries import owner_key, segment_prefix
from deployments.segment_store.redis_connection import connect
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.format import SegmentHeader, head_bytes, seal, sealed_bytes
from kvmanager.segments.guard import SALT_BYTES, SegmentGuard
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.engine import SECRET
from load_tests.harness.memory_port import made_up_hashes
from load_tests.harness.tiers import own_redis, start_manager
from load_tests.measuring.program import out
from load_tests.measuring.spread import percentile
from load_tests.micro.index_scale import SEGMENT_BLOCKS, prompts

APP = "rebuild"
NODE = "node"
FINGERPRINT = b"b" * 32
CONFIG = ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS, save_s=3600.0)
PROMPT_SEGMENTS = 10
SHAPE = (1, 2, 32 * SEGMENT_BLOCKS, 1, 1)
SEALED_BYTES = sealed_bytes(SHAPE, "float16", SEGMENT_BLOCKS)
DEVICE_BLOCKS = 10_000
PLAN_DEADLINE_S = 0.25
"""How long a replica waits for a plan, by default."""
PAUSE_S = 0.005
PATIENCE_S = 300.0


class FilledTier(CPUTier):
    """A CPU tier that begins with segments, all of them the same small object."""

    def __init__(self, app_name: str, node_id: str, segments: int) -> None:
        super().__init__(app_name, node_id, 10**15, 0)
        ref = ray.put(np.zeros(1, np.uint8))
        for _, spans in prompts(0, segments, PROMPT_SEGMENTS):
            for span in spans:
                self._own(ref, span, SEALED_BYTES)


@dataclass(slots=True)
class Probe:
    """What the prober saw from the kill on, in seconds after it; `unanswered` plans are recomputed prompts."""

    first_plan_s: float = 0.0
    full: dict[str, float] = field(default_factory=dict)
    """By tier, when the manager had all that lies there."""
    plans: int = 0
    with_segments: int = 0
    unanswered: int = 0
    wrong: int = 0
    """Plans with a segment that its tier does not hold, or out of its place."""
    latencies: list[float] = field(default_factory=list)


class Prober:
    """A replica as the manager sees it. An asyncio actor."""

    def __init__(self, segments: int) -> None:
        self._manager = ManagerClient(APP)
        self._prompts = list(prompts(0, segments, PROMPT_SEGMENTS))
        self._segments = segments
        self._rng = random.Random(1)
        self._device = [BlockHash(self._rng.randbytes(32)) for _ in range(DEVICE_BLOCKS)]

    async def until_full(self, tiers: Sequence[str]) -> Probe:
        """Ask for plans until the manager knows everything in these tiers, and a second longer."""
        probe, began, end = Probe(), time.monotonic(), float("inf")
        counting = asyncio.create_task(self._count(probe, began, tiers))
        while time.monotonic() < min(end, began + PATIENCE_S):
            await self._plan(probe, began)
            await asyncio.sleep(PAUSE_S)
            if counting.done() and end == float("inf"):
                end = time.monotonic() + 1.0
        counting.cancel()
        return probe

    async def _plan(self, probe: Probe, began: float) -> None:
        hashes, spans = self._rng.choice(self._prompts)
        asked = time.monotonic()
        try:
            plan = await self._manager.ask("plan", "prober", NODE, PlanQuery(hashes), timeout_s=PLAN_DEADLINE_S)
            if plan is None:
                await self._manager.ask(
                    "register_replica", "prober", 0, NODE, self._device, EngineFacts(FINGERPRINT), timeout_s=PATIENCE_S
                )
                return
        except ManagerUnavailableError:
            probe.unanswered += 1
            return
        probe.latencies.append(time.monotonic() - asked)
        probe.first_plan_s = probe.first_plan_s or time.monotonic() - began
        probe.plans += 1
        probe.with_segments += bool(plan.segments)
        probe.wrong += [segment[:3] for segment in plan.segments] != [
            (span.key, span.start_block, span.num_blocks) for span in spans[: len(plan.segments)]
        ]
        await self._manager.ask("release", [plan.lease_id], timeout_s=PATIENCE_S)

    async def _count(self, probe: Probe, began: float, tiers: Sequence[str]) -> None:
        while set(tiers) - set(probe.full):
            await asyncio.sleep(0.05)
            try:
                books = await self._manager.ask("api", "stats", timeout_s=5.0)
            except ManagerUnavailableError:
                continue
            for location in books["locations"]:
                if location["segments"] == self._segments:
                    probe.full.setdefault(location["tier"], time.monotonic() - began)


@dataclass(slots=True)
class Rebuild:
    """One kill. Seconds are counted from it."""

    segments: int
    held_by: str
    first_plan_s: float
    full_s: dict[str, float]
    full_after_first_plan_s: float
    plans: int
    plans_with_segments: int
    plans_unanswered: int
    wrong_plans: int
    plan_p50_ms: float
    plan_worst_ms: float

    @property
    def last_full_s(self) -> float:
        """Until every tier's segments were known."""
        return max(self.full_s.values(), default=float("inf"))


def measure(segments: int) -> Iterator[Rebuild]:
    """Kill a manager over a CPU tier, over Redis, and over both. Within `own_ray`."""
    segments -= segments % PROMPT_SEGMENTS
    prober: Any = ray.remote(num_cpus=0)(Prober).remote(segments)
    with own_redis(4 * segments * SEALED_BYTES) as server:
        out.print(f"{segments} segments are written to Redis")
        _fill(server.url, segments)
        for tiers in ((Tier.CPU,), (Tier.REDIS,), (Tier.CPU, Tier.REDIS)):
            out.print(f"{segments} segments in {_names(tiers)}: the manager is killed and rebuilt")
            yield _kill_and_rebuild(segments, server.url, prober, tiers)
    ray.kill(prober)


def _kill_and_rebuild(segments: int, redis_url: str, prober: Any, tiers: Sequence[Tier]) -> Rebuild:
    with_redis, names = Tier.REDIS in tiers, [tier.value for tier in tiers]
    manager = start_manager(APP, CONFIG, with_redis)
    actors: list[Any] = []
    try:
        if Tier.CPU in tiers:
            options = {"name": tier_name(APP, NODE), "namespace": SERVE_NAMESPACE, "num_cpus": 0}
            actors.append(ray.remote(FilledTier).options(**options).remote(APP, NODE, segments))
        if with_redis:
            config = RedisTierConfig(
                app_name=APP, url=redis_url, folder="", namespace="bench", budget_bytes=10**12, expire_s=0,
                deadline_s=5.0,
            )  # fmt: skip
            actors.append(ray.remote(RedisTier).options(num_cpus=0).remote(config, SECRET))
        ray.get(prober.until_full.remote(names), timeout=PATIENCE_S)
        ray.kill(manager)
        probing = prober.until_full.remote(names)
        manager = _start_successor(with_redis)
        probe: Probe = ray.get(probing, timeout=PATIENCE_S)
    finally:
        for actor in (*actors, manager):
            ray.kill(actor)
        _give_up_claim(redis_url)
    return Rebuild(
        segments=segments,
        held_by=_names(tiers),
        first_plan_s=probe.first_plan_s,
        full_s=probe.full,
        full_after_first_plan_s=max(probe.full.values(), default=float("inf")) - probe.first_plan_s,
        plans=probe.plans,
        plans_with_segments=probe.with_segments,
        plans_unanswered=probe.unanswered,
        wrong_plans=probe.wrong,
        plan_p50_ms=percentile(probe.latencies, 50) * 1e3,
        plan_worst_ms=max(probe.latencies) * 1e3,
    )


def _start_successor(with_redis: bool) -> Any:
    """The name is free as soon as Ray has noticed that its last owner is gone."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return start_manager(APP, CONFIG, with_redis)
        except ValueError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _fill(url: str, segments: int) -> None:
    """Write segments as `RedisStore.put` does, many at once."""
    client = connect(url, PATIENCE_S)
    guard = SegmentGuard(SECRET)
    prefix = segment_prefix("bench", FINGERPRINT)
    for _, spans in prompts(0, segments, PROMPT_SEGMENTS):
        pipeline = client.pipeline(transaction=False)
        for span in spans:
            whole, start = _sealed(span), head_bytes(SEGMENT_BLOCKS)
            head, body = guard.guard(whole[:start], whole[start:], secrets.token_bytes(SALT_BYTES))
            pipeline.hset(prefix + span.key.hex().encode(), "0", bytes(body), {"h": bytes(head)})
        pipeline.execute()
    client.close()


def _sealed(span: SegmentSpan) -> bytes:
    buffer = bytearray(SEALED_BYTES)
    seal(buffer, SegmentHeader.raw(span, made_up_hashes(span), FINGERPRINT, SHAPE, "float16"))
    return bytes(buffer)


def _give_up_claim(url: str) -> None:
    """What a Redis tier that was killed leaves behind for ten seconds."""
    client = connect(url, PATIENCE_S)
    client.unlink(owner_key("bench", FINGERPRINT))
    client.close()


def _names(tiers: Sequence[Tier]) -> str:
    return " and ".join({Tier.CPU: "a CPU tier", Tier.REDIS: "Redis"}[tier] for tier in tiers)
