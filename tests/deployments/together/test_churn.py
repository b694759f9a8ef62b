"""Small tiers that churn, a Redis that fails and damages, replies that are lost: every answer is the undisturbed one.

The float32 engine of this process, a manager, a CPU tier, a prefetch worker and a Redis tier in a real Ray. The
reference is the same engine with all of each prompt computed, nothing read from any cache.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_engine import BLOCK, SEGMENT_BLOCKS, LiveEngine, usage

from configs.settings import Settings, load_settings
from deployments.manager.config import manager_config
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.manager_client import ManagerClient
from deployments.protocol.wire import GenerateRequest
from deployments.redis_tier.server import EmbeddedRedis
from deployments.replica.prompt_plans import PromptPlans
from load_tests.faults.lost_answers import lose_answers
from load_tests.harness.disturbed_redis import StoreFaults, disturbed
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import until
from load_tests.harness.tiered_engine import PortSource
from load_tests.harness.tiers import MIB, Tiers, own_redis, redis_config
from tests.sizes import LONG

pytestmark = pytest.mark.server

APP, REPLICA = "churn", "replica"
CPU_BYTES, REDIS_BYTES = 8 * MIB, 16 * MIB
MOST_HELD = 40
"""Segments of .75 MiB that both tiers hold together, and some more. When more have left, all have been exchanged."""
ENOUGH = {"device": 200, "cpu": 200, "redis": 64, "evicted": MOST_HELD, "damaged": 0, "failed": 0, "lost": 0}
"""Above each of these the run means something: prompt tokens by tier, segments, reads, calls, replies."""
AT_ONCE, TURNS = 6, 3
ROUNDS = (10, 20) if LONG else (2, 20)
"""At least so many; at most so many until all is `ENOUGH`."""
LOST_SHARE, ERROR_SHARE, DAMAGED_SHARE = 0.05, 0.15, 0.1
"""Of replies, calls of Redis, and what is read. A busy machine makes few calls, and none of .05 of forty may fail."""
LARGEST_DIFFERENCE = 1e-4
"""Of a token's logprob. Another order of additions gives 1e-6."""


def settings(model: Path) -> Settings:
    # Least recently used goes first, for the default policy would rather refuse what is new than let all of it churn.
    kv = {
        "segment_tokens": SEGMENT_BLOCKS * BLOCK, "cpu_tier_bytes": CPU_BYTES, "redis_bytes": REDIS_BYTES,
        "prefetch_workers": 1, "eviction_policy": "lru", "load_or_recompute": "load", "redis_codec": "raw",
        "load_deadline_s": 8.0, "lease_s": 8.0,  # of a lost plan, which is waited for in the end
    }  # fmt: skip
    return load_settings({"model": str(model), "dtype": "float32", "kv": kv})


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    usage: dict[str, int]


class Churn:
    """The engine's replica over tiers of its own, and conversations with it."""

    def __init__(self, engine: LiveEngine, wanted: Settings, server: EmbeddedRedis) -> None:
        self.engine = engine
        faults = StoreFaults(ERROR_SHARE, DAMAGED_SHARE, damaged_bytes=64)
        redis = disturbed(redis_config(APP, server, wanted), faults)
        self.tiers = Tiers(APP, manager_config(wanted), CPU_BYTES, wanted.kv.prefetch_workers, redis)
        self.port = engine.port = ClusterPort(APP, REPLICA, self.tiers.node, wanted.kv, ManagerClient(APP))
        self.tiers.wait_until_ready(self.keep_alive)
        lose_answers(self.port.manager, LOST_SHARE)
        self._plans = PromptPlans(PortSource(self.port, None), BLOCK)
        self._numbers = itertools.count()
        self.turns: list[Turn] = []

    def keep_alive(self) -> None:
        self.tiers.keep_alive(self.engine.fingerprint, REPLICA)

    async def converse(self, draw: random.Random) -> None:
        """Conversations share beginnings, go on behind their answers, or leave what was said so far at any token."""
        so_far = prompt(draw.choice((9000, 9001, draw.randrange(10_000))), 900)[: int(40 * 20 ** draw.random())]
        for _ in range(TURNS):
            if draw.random() < 0.25:
                await self._clear(*draw.sample(("device", "cpu"), draw.randint(1, 2)))
            turn = await self._ask(so_far, draw.randint(4, 40))
            self.turns.append(turn)
            so_far = [*turn.prompt, *turn.answer]
            if draw.random() < 0.4:
                so_far = so_far[: draw.randrange(1, len(so_far))]
            so_far += prompt(draw.randrange(10_000), draw.randint(4, 60))

    async def _ask(self, tokens: list[int], max_tokens: int) -> Turn:
        """As `deployments.replica.replica.Replica.generate`."""
        params, hashes = greedy(max_tokens, logprobs=0), list(self.engine.hashes(tokens))
        request = GenerateRequest(f"churn-{next(self._numbers)}", tokens, params, self.engine.salt, hashes)
        planned = await self._plans.ask(request)
        hints = EngineHints(planned.plan) if planned.plan is not None else None
        async for output in self.engine.generate(tokens, params, hints):
            planned.begun()
            last = output
        planned.ended(last)
        return Turn(tokens, *said(last), usage(last))

    async def _clear(self, *tiers: str) -> None:
        if "device" in tiers:
            await asyncio.wrap_future(self.engine.reuse.clear_device(None))
        if "cpu" in tiers:
            await self.tiers.manager.api.remote("clear", ["cpu"], 5.0)

    def seen(self) -> Counter[str]:
        """What `ENOUGH` names, so far."""
        found: Counter[str] = Counter(evicted=self.tiers.ask("api", "stats")["counters"]["evicted_segments"])
        for turn in self.turns:
            found.update(turn.usage)
        for why, count in self.tiers.ask_tier("stats")["pull_failures"].items():
            found["damaged" if why.startswith("mismatch") else "failed" if why == "unreachable" else why] += count
        found["lost"] = self.port.counters["plan_unanswered"] + self.port.counters["offer_unanswered"]
        return found

    def end(self) -> None:
        """When nothing of what was lost on the way is held any more."""
        self.port.manager = ManagerClient(APP)
        self.engine.settle()
        self.port.flush()

        def at_rest() -> bool:
            self.keep_alive()
            return self.tiers.at_rest()

        until(at_rest, "leases and saves of lost replies end by themselves")

    def close(self) -> None:
        self.port.close()
        self.tiers.close()


def said(output: Any) -> tuple[list[int], list[float]]:
    """An answer's tokens, and how likely each was."""
    tokens = list(output.outputs[0].token_ids)
    return tokens, [step[token].logprob for token, step in zip(tokens, output.outputs[0].logprobs, strict=True)]


@pytest.fixture
def churn(engine: LiveEngine, demo_model: Path, ray_cluster: Any) -> Iterator[Churn]:
    with own_redis(2 * REDIS_BYTES) as server:
        made = Churn(engine, settings(demo_model), server)
        yield made
        made.close()
        engine.reuse.order_device(True).result()  # and forget the epoch of the manager that was


def undisturbed(engine: LiveEngine, turns: list[Turn]) -> list[tuple[list[int], list[float]]]:
    """What the engine answers to the same prompts when it computes all of each."""
    engine.port = MemoryPort()
    engine.port.refuse_offers = True

    async def compute(turn: Turn) -> Any:
        params = greedy(len(turn.answer), logprobs=0, skip_reading_prefix_cache=True)
        output = await engine.answer(turn.prompt, params, planned=False)
        assert usage(output)["recomputed"] == len(turn.prompt)
        return said(output)

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*map(compute, turns)))

    return engine.run(all_of_them())


def test_tiers_that_churn_and_fail_change_no_answer(churn: Churn) -> None:
    least, most = ROUNDS
    for number in range(most):

        async def conversations(number: int = number) -> None:
            draws = (random.Random(f"{number}/{conversation}") for conversation in range(AT_ONCE))
            await asyncio.gather(*map(churn.converse, draws))

        churn.engine.run(conversations())
        churn.keep_alive()
        seen = churn.seen()
        if number + 1 >= least and all(seen[what] > count for what, count in ENOUGH.items()):
            break
    assert {what: seen[what] for what, count in ENOUGH.items() if seen[what] <= count} == {}, f"too little of: {seen}"
    assert sum(sum(turn.usage.values()) for turn in churn.turns) == sum(len(turn.prompt) for turn in churn.turns)
    churn.end()

    different, largest = [], 0.0
    for turn, (answer, logprobs) in zip(churn.turns, undisturbed(churn.engine, churn.turns), strict=True):
        if turn.answer != answer:
            different.append((len(turn.prompt), turn.usage, turn.answer, answer))
        else:
            largest = max(largest, *(abs(ours - theirs) for ours, theirs in zip(turn.logprobs, logprobs, strict=True)))
    assert different == []
    assert largest < LARGEST_DIFFERENCE
