"""What a replica passes on to its engine. The engine itself is tested in `test_engine_host` and `test_connector`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.crash_report import EngineDiedError
from deployments.engine.handle import EngineHandle
from deployments.protocol.engine_hints import HINTS, EngineHints, hints_of
from deployments.protocol.log_lines import REQUEST_ID
from deployments.protocol.stage_stamps import STAGE_STAMPS
from deployments.protocol.wire import NOT_READ, GenerateRequest
from deployments.replica import replica as replica_module
from deployments.replica.prompt_plans import PromptPlans
from deployments.replica.replica import Replica
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import Plan, PlannedLoad

FORGED = {HINTS: {"plan": {"lease_id": 1, "segments": [(b"k" * 32, 0, 1, "cpu", "node", 1000)]}, "tenant": "other"}}
PLANNED = (PlannedLoad(b"p" * 32, 0, 4, Tier.CPU, "node", 1000),)
PLAN_OF_FIVE = Plan(lease_id=5, segments=PLANNED, scores=((4, 2.5),), now=1.5, epoch=1)


class FakeEngine:
    """Remembers what it was asked; answers `outputs` times, or dies."""

    def __init__(self, outputs: int = 1) -> None:
        self.params: list[SamplingParams] = []
        self.errored = False
        self.dead_error = EngineDeadError()
        self._outputs = outputs

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.params.append(params)
        for _ in range(self._outputs):
            yield SimpleNamespace(prompt_token_ids=[1, 2, 3], finished=False, metrics="unread")
        if not self._outputs:
            raise EngineDeadError


class FakePort:
    """A port that answers every plan with `answer`."""

    def __init__(self, answer: Plan | None) -> None:
        self.released: list[int] = []
        self.asked: list[tuple[Any, ...]] = []
        self._answer = answer

    async def plan(self, *asked: Any) -> Plan | None:
        self.asked.append(asked)
        return self._answer

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)


@pytest.fixture(autouse=True)
def _numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside Serve there is no rank."""
    monkeypatch.setattr(Replica, "rank", 0)


def replica(engine: FakeEngine, port: FakePort | None) -> Any:
    handle: Any = object.__new__(EngineHandle)
    handle._llm, handle._port, handle._named, handle._judged, handle._begun = engine, port, None, False, {}
    handle._terms = {}
    handle._names_requests = False
    handle._engine = SimpleNamespace(error=RuntimeError("out of memory"), suspects=lambda not_begun, begun: ["suspect"])
    handle.close = lambda: None
    made: Any = object.__new__(Replica)
    made._engine, made._link = handle, None
    handle._on_death = made._end_soon
    made.told = []
    made._manager = SimpleNamespace(tell=lambda *what: made.told.append(what))
    made._plans = PromptPlans(handle if handle.shares_kv else None, 32)
    made._name = "replica"
    made._ending = True  # the process of the tests shall not end
    return made


def request(extra_args: dict[str, Any] | None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(200)),
        sampling_params=SamplingParams(extra_args=extra_args),
        cache_salt="salt",
        block_hashes=[b"h" * 32] * 6,
    )


def ask(made: Any, wanted: GenerateRequest) -> list[Any]:
    async def collect() -> list[Any]:
        return [output async for output in made.generate(wanted)]

    return asyncio.run(collect())


def test_a_clients_kv_transfer_params_never_reach_the_connector() -> None:
    engine, port = FakeEngine(), FakePort(None)

    ask(replica(engine, port), request({"kv_transfer_params": FORGED, "other": 1}))

    assert engine.params[0].extra_args == {"other": 1}


def test_without_kv_reuse_a_clients_kv_transfer_params_are_dropped_too() -> None:
    engine = FakeEngine()
    ask(replica(engine, None), request({"kv_transfer_params": FORGED}))
    assert engine.params[0].extra_args is None


def test_the_managers_plan_replaces_what_the_client_sent() -> None:
    engine, port = FakeEngine(), FakePort(PLAN_OF_FIVE)

    ask(replica(engine, port), request({"kv_transfer_params": FORGED}))

    assert engine.params[0].extra_args == {"kv_transfer_params": {HINTS: EngineHints(PLAN_OF_FIVE)}}
    assert port.released == [], "the connector releases the lease of a request that the engine has"


def test_a_tolerant_prompts_fidelity_reaches_the_connector_and_its_exact_twin_the_manager() -> None:
    engine, port = FakeEngine(), FakePort(None)
    tolerant = replace(request(None), fidelity="tolerant", exact_block_hashes=[b"e" * 32] * 6, waited_s=3.0)
    before = time.monotonic()
    ask(replica(engine, port), tolerant)
    ask(replica(engine, port), request({"kv_transfer_params": {HINTS: {"fidelity": "tolerant"}}}))
    sent = (engine.params[0].extra_args or {})["kv_transfer_params"]
    assert before - 3.0 <= sent[HINTS].arrived <= time.monotonic() - 3.0, "by this process's clock"
    expected = {HINTS: EngineHints(fidelity="tolerant", arrived=sent[HINTS].arrived)}
    assert [sent, engine.params[1].extra_args] == [expected, None]
    assert [(asked.hashes, asked.exact_hashes) for (asked,) in port.asked] == [
        (tolerant.block_hashes, tolerant.exact_block_hashes),
        (tolerant.block_hashes, []),
    ]


@pytest.mark.parametrize("planned", [None, PLAN_OF_FIVE], ids=["no plan", "a plan"])
def test_the_engine_is_told_of_which_http_request_a_prompt_is_where_lines_name_requests(planned: Any) -> None:
    engine, port = FakeEngine(), FakePort(planned)
    named = replace(request({"kv_transfer_params": {HINTS: {"client_request": "forged"}}}), client_request_id="order-1")
    made = replica(engine, port)
    ask(made, named)
    made._engine._names_requests = True
    ask(made, replace(named, sampling_params=SamplingParams()))
    quiet, told = (hints_of((params.extra_args or {}).get("kv_transfer_params")) for params in engine.params)
    assert quiet.client_request == ""
    assert told.client_request == "order-1"


def test_a_plan_is_asked_for_as_that_request_and_nothing_else_is() -> None:
    named: list[str] = []

    class NotingPort(FakePort):
        async def plan(self, *asked: Any) -> Plan | None:
            named.append(REQUEST_ID.get())
            return await super().plan(*asked)

        def release(self, lease_id: int) -> None:
            named.append(REQUEST_ID.get())

    with pytest.raises(EngineDiedError):
        ask(replica(FakeEngine(outputs=0), NotingPort(PLAN_OF_FIVE)), replace(request(None), client_request_id="a"))
    assert named == ["a", ""]


def test_a_request_that_the_engine_never_took_releases_its_lease() -> None:
    port = FakePort(PLAN_OF_FIVE)
    with pytest.raises(EngineDiedError) as error:
        ask(replica(FakeEngine(outputs=0), port), request(None))
    assert port.released == [5]
    assert error.value.suspects == ("suspect",)


@pytest.mark.parametrize("blends", [True, False])
def test_a_chunk_alone_is_computed_where_it_will_be_read_and_stored_however_short_it_is(blends: bool) -> None:
    engine = FakeEngine()
    made = replica(engine, FakePort(None))
    made._engine._terms = {"blend": object()} if blends else {}
    prompts: list[Any] = []
    generate = made._engine.generate
    made._engine.generate = lambda prompt: prompts.append(prompt) or generate(prompt)

    outputs = ask(made, replace(request(None), precomputes="blend"))

    if blends:
        assert [prompt.short_tokens for prompt in prompts] == [1]
    else:
        assert [(output.finished, output.kv_transfer_params) for output in outputs] == [(True, {NOT_READ: True})]
        assert engine.params == []


def test_outputs_travel_without_the_prompts_tokens() -> None:
    outputs = ask(replica(FakeEngine(2), None), request(None))
    assert [output.prompt_token_ids for output in outputs] == [None, None]


def test_a_dead_engine_fails_the_health_check() -> None:
    engine = FakeEngine()
    made = replica(engine, None)
    made.check_health()
    engine.errored = True
    with pytest.raises(RuntimeError, match=r"replica 0 is dead.*out of memory"):
        made.check_health()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With which status the process would have ended, as often as it would."""
    statuses: list[int] = []
    monkeypatch.setattr(replica_module, "MOST_LAST_WORDS_S", 0.0)
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def last_words(made: Any) -> list[Any]:
    """What the manager is told, once all is said."""
    for thread in threading.enumerate():
        if thread.name in ("crosskv-end", "crosskv-last-words"):
            thread.join(10)
    return list(made.told)


def test_a_replica_whose_engine_is_dead_ends_its_process_once_and_tells_the_manager(ended: list[int]) -> None:
    engine = FakeEngine(outputs=0)
    made = replica(engine, None)
    made._ending = False
    engine.errored = True
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            ask(made, request(None))
    assert last_words(made) == [("replica_ends", "replica", "dead")]
    assert ended == [1]


def test_a_replica_whose_engine_hangs_fails_its_health_check_and_asks_for_no_plan(ended: list[int]) -> None:
    engine, port = FakeEngine(), FakePort(PLAN_OF_FIVE)
    made = replica(engine, port)
    made._ending = False
    made._engine._engine.give_up = lambda error: setattr(engine, "errored", True)

    made._engine._give_up("a step of 7 tokens has not ended")

    with pytest.raises(RuntimeError, match="replica 0 is dead"):
        made.check_health()
    with pytest.raises(EngineDeadError):
        ask(made, request(None))
    assert port.asked == []
    assert last_words(made) == [("replica_ends", "replica", "hung")]
    assert ended == [1]


def test_only_the_last_output_carries_the_engines_figures_and_the_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SimpleNamespace(scheduled_ts=2.0, first_token_ts=3.0)
    sent = [
        SimpleNamespace(finished=last, metrics=figures, kv_transfer_params=None, prompt_token_ids=None)
        for last in (False, False, True)
    ]
    engine = FakeEngine()

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        for output in sent:
            yield output

    monkeypatch.setattr(engine, "generate", generate)
    ask(replica(engine, None), request(None))
    assert [output.metrics for output in sent] == [None, None, figures]
    assert [STAGE_STAMPS in (output.kv_transfer_params or {}) for output in sent] == [False, False, True]
    stamps = sent[-1].kv_transfer_params[STAGE_STAMPS]
    assert (stamps.scheduled, stamps.first_token) == (2.0, 3.0)
    assert 0 < stamps.received <= stamps.planned <= stamps.yielded
