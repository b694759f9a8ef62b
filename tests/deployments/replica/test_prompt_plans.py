"""From a plan's reason to the client's usage, with an engine and a port of the test's own."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm import SamplingParams

from app.metrics.ingress import IngressMetrics
from app.metrics.usage import RequestKVUsage, prompt_usage
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest
from deployments.replica.prompt_plans import COMPUTED_WHOLE, LOAD_FAILED, NO_PLAN, SHORT, PromptPlans
from kvmanager.extensions.sparse.retained_prefixes import SPARSE, PlannedSparse
from kvmanager.extensions.states.landings import STATES, LandingQuery
from kvmanager.moves.plan import LANDINGS, Plan, PlanExpectation, PlannedLoad, PlanQuery, PlanReason

BLOCK = 32
PROMPT_TOKENS = 200


class FakePort:
    """Answers with `answer`, remembers what it was asked and told."""

    def __init__(self, answer: Plan | None) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int]] = []
        self.samples: list[tuple[Any, ...]] = []
        self.terms: dict[str, Any] = {}
        self.sparse: list[Any] = []
        self.landings: list[bool] = []
        self.states: list[LandingQuery | None] = []

    async def plan(self, query: PlanQuery) -> Plan | None:
        self.states.append(query.extras.get(STATES))
        self.sparse.append(query.extras.get(SPARSE))
        self.landings.append(query.needs_landing)
        self.asked.append((query.prompt_tokens, query.queued_tokens))
        return self.answer

    def report_rate(self, sample: tuple[Any, ...]) -> None:
        self.samples.append(sample)


def planned(blocks: int, reason: str, tier: str = "redis", device_tokens: int = 0, short_tokens: int = 0) -> Plan:
    segments = (PlannedLoad(b"k" * 32, 0, blocks, tier, "", 1000, 1000),) if blocks else ()
    expected = PlanExpectation(
        load_s=0.012, recompute_s=0.034, deadline_s=2.0, device_tokens=device_tokens, short_tokens=short_tokens
    )
    return Plan(1, segments, PlanReason(reason), now=1.0, epoch=1, expected=expected)


@pytest.mark.parametrize(
    ("begins", "block"),
    [(2 * BLOCK, 2), (PROMPT_TOKENS - 1, 6), (BLOCK - 1, 0), (PROMPT_TOKENS, 0), (-BLOCK, 0), (1 << 70, 0), ("2", 0)],
    ids=lambda value: str(value),
)
def test_an_engine_with_states_asks_with_the_block_before_the_last_message_if_there_is_one(
    begins: Any, block: int
) -> None:
    port = FakePort(planned(0, "cold"))
    port.terms = {STATES: 3}
    asyncio.run(PromptPlans(port, BLOCK).ask(replace(request(), extras={STATES: begins})))
    asyncio.run(PromptPlans(port, BLOCK).ask(request()))
    assert port.states == [LandingQuery(block, 3), LandingQuery(0, 3)]


@pytest.mark.parametrize(("fidelity", "asked"), [("tolerant", "budgets"), ("exact", None), ("blended", None)])
def test_only_a_tolerant_prompt_is_planned_for_sparse_kv(fidelity: Any, asked: str | None) -> None:
    port = FakePort(planned(0, "cold"))
    port.terms = {SPARSE: "budgets"}
    asyncio.run(PromptPlans(port, BLOCK).ask(replace(request(), fidelity=fidelity)))
    assert port.sparse == [asked]


@pytest.mark.parametrize(("terms", "needs"), [({LANDINGS: True}, True), ({SPARSE: "budgets"}, False)])
def test_the_manager_hears_whether_a_devices_blocks_may_count_for_nothing(terms: dict[str, Any], needs: bool) -> None:
    port = FakePort(planned(0, "cold"))
    port.terms = terms
    asyncio.run(PromptPlans(port, BLOCK).ask(request()))
    assert port.landings == [needs]


def test_a_sparse_plan_is_what_was_planned_and_its_prefill_is_no_sample() -> None:
    sparse = PlannedSparse(planned(5, "hit").segments, kept=((1,),), forms=(b"f",), digest=b"d")
    port = FakePort(replace(planned(0, "hit"), extras={SPARSE: sparse}))
    port.terms = {SPARSE: "budgets"}
    plans = PromptPlans(port, BLOCK)
    asked = asyncio.run(plans.ask(replace(request(), fidelity="tolerant")))
    assert asked.salt not in (None, request().cache_salt), "it has names of its own"
    assert plans.queued_tokens == PROMPT_TOKENS - 5 * BLOCK
    asked.begun()
    usage: Any = {"device": 0, "cpu": 0, "redis": 5 * BLOCK, "recomputed": PROMPT_TOKENS - 5 * BLOCK, "replica": ""}
    times = SimpleNamespace(first_token_ts=2.0, scheduled_ts=1.0)
    output: Any = SimpleNamespace(kv_transfer_params={KV_CACHE_USAGE: usage}, metrics=times)
    asked.ended(output)
    assert usage["reason"] == "hit"
    assert port.samples == []


def request(tokens: int = PROMPT_TOKENS) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(),
        cache_salt="salt",
        block_hashes=[b"h" * 32] * (tokens // BLOCK),
    )


def output(tokens: int = PROMPT_TOKENS, device: int = 0, cpu: int = 0, redis: int = 0) -> Any:
    usage = {
        "device": device, "cpu": cpu, "redis": redis, "recomputed": tokens - device - cpu - redis, "replica": "0",
    }  # fmt: skip
    metrics = SimpleNamespace(scheduled_ts=10.0, first_token_ts=10.25)
    return SimpleNamespace(
        kv_transfer_params={KV_CACHE_USAGE: usage}, metrics=metrics, request_id="r", num_cached_tokens=0
    )


def ended(plans: PromptPlans, last: Any, wanted: GenerateRequest | None = None) -> dict[str, Any]:
    """What the client's usage says of a prompt whose last output is `last`."""
    plan = asyncio.run(plans.ask(wanted or request()))
    plan.begun()
    plan.ended(last)
    usage = RequestKVUsage()
    usage.add(prompt_usage(last, len((wanted or request()).prompt_token_ids)))
    return usage.fields()


@pytest.mark.parametrize("reason", list(PlanReason))
def test_the_reason_of_the_plan_reaches_the_clients_usage(reason: PlanReason) -> None:
    found = ended(PromptPlans(FakePort(planned(0, reason.value)), BLOCK), output())  # type: ignore[arg-type]
    assert found["reason"] == reason.value
    assert found["recomputed"] == PROMPT_TOKENS


def test_several_prompts_of_one_request_have_their_reasons_side_by_side() -> None:
    usage = RequestKVUsage()
    for reason in ("hit", "cold", "hit"):
        last = output()
        last.kv_transfer_params[KV_CACHE_USAGE]["reason"] = reason
        usage.add(prompt_usage(last, PROMPT_TOKENS))
    assert usage.fields()["reason"] == "hit,cold"


def test_a_load_that_brought_less_than_planned_says_so() -> None:
    plans = PromptPlans(FakePort(planned(6, "hit")), BLOCK)  # type: ignore[arg-type]
    assert ended(plans, output(redis=4 * BLOCK))["reason"] == LOAD_FAILED
    assert ended(plans, output(redis=6 * BLOCK))["reason"] == "hit"
    assert ended(plans, output(device=6 * BLOCK))["reason"] == "hit"


def test_a_prompt_whose_logprobs_are_asked_for_is_not_planned_and_no_load_of_it_failed() -> None:
    port = FakePort(planned(4, PlanReason.HIT))
    wanted = replace(request(), sampling_params=SamplingParams(prompt_logprobs=1))
    usage = ended(PromptPlans(port, BLOCK), output(), wanted)  # type: ignore[arg-type]
    assert port.asked == [], "no lease is asked for in vain"
    assert usage["reason"] == COMPUTED_WHOLE


def test_the_last_token_is_computed_whatever_was_planned() -> None:
    plans = PromptPlans(FakePort(planned(6, "hit")), BLOCK)  # type: ignore[arg-type]
    found = ended(plans, output(6 * BLOCK, redis=5 * BLOCK), request(6 * BLOCK))
    assert found["reason"] == "hit"


def test_without_an_answer_or_without_a_cache_that_is_said() -> None:
    assert ended(PromptPlans(FakePort(None), BLOCK), output())["reason"] == NO_PLAN  # type: ignore[arg-type]
    assert "reason" not in ended(PromptPlans(None, BLOCK), output())


def test_a_continued_answer_is_planned_and_measured_with_what_it_has_answered() -> None:
    port = FakePort(planned(4, "hit"))
    plans = PromptPlans(port, BLOCK)
    wanted = replace(request(), resumed_tokens=[1] * 100)
    plan = asyncio.run(plans.ask(wanted))
    assert port.asked == [(PROMPT_TOKENS + 100, 0)]
    assert plans.queued_tokens == PROMPT_TOKENS + 100 - 4 * BLOCK
    plan.begun()
    plan.ended(output(PROMPT_TOKENS + 100, redis=4 * BLOCK))
    assert port.samples == [("prefill", PROMPT_TOKENS + 100 - 4 * BLOCK, 0.25, 4 * BLOCK)]


def test_short_prompts_are_not_planned_once_the_break_even_is_known() -> None:
    port = FakePort(planned(0, "cold", short_tokens=100))
    plans = PromptPlans(port, BLOCK)  # type: ignore[arg-type]
    assert ended(plans, output(99), request(99))["reason"] == "cold"
    assert ended(plans, output(99), request(99))["reason"] == SHORT
    assert ended(plans, output(), request())["reason"] == "cold"
    assert ended(plans, output(20), request(20))["reason"] == SHORT
    assert [tokens for tokens, _ in port.asked] == [99, PROMPT_TOKENS]


def test_what_waits_to_be_computed_is_told_with_the_next_plan() -> None:
    async def three() -> list[Any]:
        begun = [await plans.ask(request()) for _ in range(2)]
        begun[0].begun()
        begun[0].begun()
        return [*begun, await plans.ask(request())]

    port = FakePort(planned(4, "hit", device_tokens=2 * BLOCK))
    plans = PromptPlans(port, BLOCK)  # type: ignore[arg-type]
    for plan in asyncio.run(three()):
        plan.begun()
    rest = PROMPT_TOKENS - 4 * BLOCK
    assert [queued for _, queued in port.asked] == [0, rest, rest]
    assert plans.queued_tokens == 0


def test_prefills_are_reported_with_what_came_before_them() -> None:
    port = FakePort(planned(4, "hit"))
    plans = PromptPlans(port, BLOCK)  # type: ignore[arg-type]
    ended(plans, output(device=2 * BLOCK, redis=2 * BLOCK))
    assert port.samples == [("prefill", PROMPT_TOKENS - 4 * BLOCK, 0.25, 4 * BLOCK)]


def test_what_was_computed_while_layers_came_is_no_sample_nor_is_what_is_shorter_than_a_block() -> None:
    port = FakePort(planned(4, "hit", tier="cpu"))
    plans = PromptPlans(port, BLOCK)  # type: ignore[arg-type]
    ended(plans, output(cpu=4 * BLOCK))
    ended(plans, output(device=PROMPT_TOKENS - BLOCK + 1))
    assert port.samples == []


def test_each_prompt_writes_one_line_for_debugging(caplog: pytest.LogCaptureFixture, own_records: Any) -> None:
    with caplog.at_level(logging.DEBUG, "deployments.replica.prompt_plans"):
        ended(PromptPlans(FakePort(planned(4, "partial")), BLOCK), output(redis=4 * BLOCK))  # type: ignore[arg-type]
    assert [record.getMessage() for record in own_records()] == [
        "r: partial; tokens: 0 device, 0 cpu, 128 redis, 72 recomputed; expected until the first token: 12.0 ms with "
        "the plan, 34.0 ms without"
    ]


def test_prompts_are_counted_by_reason() -> None:
    registry = CollectorRegistry()
    metrics = IngressMetrics(registry)
    for reason in ("hit", "hit", "cold"):
        metrics.count_prompt({"device": 0, "cpu": 0, "redis": 0, "recomputed": 1, "replica": "0", "reason": reason})
    metrics.count_prompt({"device": 0, "cpu": 0, "redis": 0, "recomputed": 1, "replica": ""})
    assert registry.get_sample_value("crosskv_plans_total", {"reason": "hit"}) == 2
    assert registry.get_sample_value("crosskv_plans_total", {"reason": "cold"}) == 1
