"""A live engine whose scheduler preempts: answers are those of the undisturbed run, KV comes back, nothing ends it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_engine import BLOCK, LiveEngine

from deployments.engine.scheduling.metrics import scheduling_families
from deployments.engine.scheduling.policy_scheduler import PolicyScheduler
from deployments.protocol.engine_hints import EngineHints
from kvmanager.scheduling.policies import MultiLevel, make_policy
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until

SLOTS = 2


@pytest.fixture(scope="module")
def live(demo_model: Path, own_engine: Any) -> LiveEngine:
    engine: LiveEngine = own_engine.start(
        lambda: LiveEngine(
            demo_model, "float32", scheduler="mlfq", tpot_target_s=0.5, max_num_seqs=SLOTS, device_blocks=70
        ),
        LiveEngine.close,
    )
    return engine


@pytest.fixture(params=["mlfq", "shortest"])
def engine(live: LiveEngine, request: pytest.FixtureRequest) -> Iterator[LiveEngine]:
    """Both policies on one engine: what decides is asked anew each time."""
    scheduler: PolicyScheduler = live.scheduler
    scheduler.policy_in_force = make_policy(request.param, scheduler.step_time)
    scheduler.fallbacks = scheduler.kept_tokens = scheduler.recomputed_tokens = 0
    scheduler.preempted.clear()
    live.port = MemoryPort()
    live.clear_device()
    yield live
    live.settle()
    until(lambda: live.blocks_in_use() == 0, "every device block is free")
    assert scheduler.jobs == {}
    assert not live.llm.errored


def ask(
    engine: LiveEngine, tokens: list[int], answer: int, seed: int | None = None, expected: int | None = None
) -> Any:
    options: dict[str, Any] = {"temperature": 0.9, "seed": seed} if seed is not None else {}
    params = greedy(answer)
    for name, value in options.items():
        setattr(params, name, value)
    return engine.generate(tokens, params, EngineHints(predicted_tokens=expected if expected is not None else answer))


async def told(stream: Any) -> list[int]:
    return list([output async for output in stream][-1].outputs[0].token_ids)


def jobs(count: int) -> list[tuple[list[int], int]]:
    """A third is long."""
    draw = random.Random(5)
    return [
        (prompt(100 + n, draw.randrange(150, 400)), draw.randrange(60, 120))
        if n % 3 == 0
        else (prompt(100 + n, draw.randrange(10, 60)), draw.randrange(3, 12))
        for n in range(count)
    ]


SERVED = 80
"""Tokens of a job that has had more than the first level's quantum, and has more left than two short jobs need."""
FIRST = [(prompt(98 + n, 200), 200) for n in range(SLOTS)]
MIXED = [*FIRST, *jobs(12)]
SEEDS = [n if n % 4 == 0 else None for n in range(len(MIXED))]


@pytest.fixture(scope="module")
def alone(live: LiveEngine) -> list[list[int]]:
    """The answers to `MIXED`, asked one after the other: whatever the policy is, it decides nothing."""
    live.port = MemoryPort()
    return [live.run(told(ask(live, *job, seed))) for job, seed in zip(MIXED, SEEDS, strict=True)]


def test_answers_are_those_of_the_undisturbed_run_whoever_is_preempted(
    alone: list[list[int]], engine: LiveEngine
) -> None:
    scheduler: PolicyScheduler = engine.scheduler

    def start(numbers: range) -> list[Any]:
        return [engine.start(told(ask(engine, *MIXED[n], SEEDS[n]))) for n in numbers]

    def served() -> bool:
        running = list(scheduler.running)
        return len(running) == SLOTS and min(request.num_output_tokens for request in running) >= SERVED

    answers = start(range(SLOTS))
    until(served, "two long jobs have all slots, and were served")
    answers += start(range(SLOTS, len(MIXED)))
    assert [answer.result(patience(120)) for answer in answers] == alone
    assert scheduler.preempted["policy"] > 0
    assert scheduler.fallbacks == 0
    lost = scheduler.kept_tokens + scheduler.recomputed_tokens
    assert lost > 0
    assert scheduler.recomputed_tokens <= scheduler.preempted.total() * BLOCK, "less than a block each"


def until_answered(engine: LiveEngine, tokens: int) -> None:
    """Until the only request has answered so many."""

    def answered() -> bool:
        running = list(engine.scheduler.running)
        return bool(running) and min(request.num_output_tokens for request in running) >= tokens

    until(answered, "an answer")


def test_a_preempted_request_finds_its_answer_in_the_tier_when_its_blocks_were_overwritten(engine: LiveEngine) -> None:
    scheduler: Any = engine.scheduler
    scheduler.policy_in_force = make_policy("fcfs", scheduler.step_time)
    long, answer = prompt(7, 300), 150
    alone = engine.run(told(ask(engine, long, answer)))
    engine.settle()
    engine.port = MemoryPort()
    engine.clear_device()
    running = [engine.start(told(ask(engine, long, answer))), engine.start(told(ask(engine, prompt(8, 300), answer)))]
    until(lambda: len(scheduler.running) == SLOTS, "both run")
    until_answered(engine, 70)

    def preempt() -> int:
        scheduler.max_num_active_reqs = 0  # it may not come back yet, also when the other one has ended meanwhile
        victim = scheduler.running[0]
        scheduler.running.remove(victim)
        computed: int = victim.num_computed_tokens
        scheduler._preempt_request(victim, 0.0)
        return computed

    def let_it_back() -> None:
        scheduler.max_num_active_reqs = SLOTS

    computed = engine.on_engine_thread(preempt)
    engine.wait_for_saves()
    assert engine.clear_device() > 0
    engine.on_engine_thread(let_it_back)
    found = [future.result(patience(60)) for future in running]

    assert alone in found
    assert scheduler.preempted["memory"] == 1
    assert scheduler.kept_tokens + scheduler.recomputed_tokens == computed
    assert scheduler.recomputed_tokens < BLOCK
    assert engine.port.fetches > 0


@pytest.mark.parametrize("broken", [("enter",), ("served", "age", "gives_way")], ids=["keys", "the rest"])
def test_a_policy_that_raises_is_counted_and_everybody_is_served(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    scheduler: PolicyScheduler = engine.scheduler
    for name in broken:
        monkeypatch.setattr(type(scheduler.policy_in_force), name, lambda *_: 1 / 0)

    async def all_of(count: int) -> list[list[int]]:
        return list(await asyncio.gather(*(told(ask(engine, prompt(30 + n, 40), 12)) for n in range(count))))

    assert [len(answer) for answer in engine.run(all_of(6))] == [12] * 6
    assert scheduler.fallbacks >= 6
    assert scheduler.preempted.total() == 0


def test_a_client_that_leaves_while_it_is_preempted_leaves_nothing(engine: LiveEngine) -> None:
    scheduler: PolicyScheduler = engine.scheduler

    async def leave() -> None:
        stream = ask(engine, prompt(40, 200), 200)
        await anext(stream)
        await stream.aclose()

    async def beside() -> None:
        long = [asyncio.ensure_future(leave()) for _ in range(2)]
        await asyncio.sleep(0.05)
        await asyncio.gather(*long, *(told(ask(engine, prompt(50 + n, 20), 4)) for n in range(4)))

    engine.run(beside())
    engine.settle()
    assert scheduler._lost == {}


def test_what_it_counts_has_names(engine: LiveEngine) -> None:
    engine.run(told(ask(engine, prompt(60, 40), 4)))
    families = [*scheduling_families(engine.scheduler), *engine.reuse.paths["preempted"].families()]
    samples = {s.name + str(sorted(s.labels.items())): s.value for family in families for s in family.samples}
    assert {family.name for family in families} == {
        "crosskv_scheduler_fallbacks", "crosskv_step_budget_tokens", "crosskv_preemptions", "crosskv_preempted_tokens",
        "crosskv_brought_ahead_blocks", "crosskv_scheduler_waiting",
    }  # fmt: skip
    assert samples["crosskv_scheduler_waiting[('level', '0')]"] == 0
    assert isinstance(MultiLevel(engine.scheduler.step_time).quantum(0), float)
