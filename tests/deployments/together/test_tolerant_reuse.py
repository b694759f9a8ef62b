"""Tolerant prompts in a real engine, in float32: they read exact KV and store under names of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from live_engine import BLOCK, LiveEngine, usage

from deployments.protocol.engine_hints import EngineHints
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanExpectation, PlannedLoad
from kvmanager.segments.format import read_header
from kvmanager.segments.keys import Fidelity, cache_salt
from load_tests.harness.engine import SECRET, greedy, prompt
from load_tests.harness.memory_port import MemoryPort


def ask_tolerant(
    engine: LiveEngine,
    tokens: Sequence[int],
    twin: Sequence[bytes] | None = None,
    max_tokens: int = 8,
    fidelity: Fidelity = "tolerant",
    recompute_s: float = 0.0,
) -> tuple[list[int], dict[str, int]]:
    """As `LiveEngine.ask` under the engine's salt, with a plan for its own names, or for those of its exact twin.

    `recompute_s`: how long the plan expects computing everything to take; 0: it does not know.
    """
    params = greedy(max_tokens)
    plan = engine.port.plan(twin or engine.hashes(tokens))
    stored = engine.port.segments
    segments = tuple(at._replace(tier=Tier.REDIS, nbytes=len(stored[at.key][1]), raw_nbytes=0) for at in plan.segments)
    plan = replace(plan, segments=segments, expected=PlanExpectation(recompute_s=recompute_s))
    params.extra_args = {"kv_transfer_params": EngineHints(plan, fidelity=fidelity).as_transfer()}
    output = engine.run(_last(engine, tokens, params))
    engine.settle()
    return list(output.outputs[0].token_ids), usage(output)


async def _last(engine: LiveEngine, tokens: Sequence[int], params: object) -> object:
    return [output async for output in engine.stream(tokens, params, planned=False)][-1]


@pytest.fixture
def tolerant(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> LiveEngine:
    """The engine, whose prompts are tolerant from now on."""
    monkeypatch.setattr(engine, "salt", cache_salt(SECRET, engine.fingerprint, "", "tolerant"))
    return engine


def test_a_tolerant_conversation_begins_with_its_exact_twins_kv_and_goes_on_with_its_own(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = prompt(701, 400)
    exact_answer, _ = engine.ask(question, max_tokens=70)
    twin = engine.hashes(question)
    stored = {key: sealed for key, (_, sealed) in engine.port.segments.items()}
    monkeypatch.setattr(engine, "salt", cache_salt(SECRET, engine.fingerprint, "", "tolerant"))

    answer, first = ask_tolerant(engine, question, twin, max_tokens=70)
    assert first == {"device": 0, "cpu": 0, "redis": 384, "recomputed": 16}, "no exact block on the device is its own"
    assert answer == exact_answer

    engine.clear_device()
    turn = question + answer + prompt(702, 50)
    again, second = ask_tolerant(engine, turn)
    assert second["redis"] == (len(question) + len(answer) - 1) // BLOCK * BLOCK, "prompt and answer"

    headers = {key: read_header(sealed) for key, (_, sealed) in engine.port.segments.items()}
    assert {key: sealed for key, (_, sealed) in engine.port.segments.items() if key in stored} == stored
    assert {header.fidelity for key, header in headers.items() if key in stored} == {"exact"}
    assert {header.fidelity for key, header in headers.items() if key not in stored} == {"tolerant"}
    assert not {header.parent for key, header in headers.items() if key not in stored} & set(stored)

    engine.clear_device()
    engine.port = MemoryPort()
    assert ask_tolerant(engine, turn)[0] == again, "what computing it anew gives"


def test_an_exact_prompt_reuses_nothing_of_a_tolerant_one(tolerant: LiveEngine) -> None:
    tokens = prompt(703, 300)
    ask_tolerant(tolerant, tokens)
    tolerant.salt = cache_salt(SECRET, tolerant.fingerprint, "")

    assert tolerant.ask(tokens)[1]["recomputed"] == 300


def test_what_is_loaded_of_its_own_is_not_offered_again(tolerant: LiveEngine) -> None:
    tokens = prompt(704, 300)
    ask_tolerant(tolerant, tokens)
    offered = len(tolerant.port.offered)
    tolerant.clear_device()

    assert ask_tolerant(tolerant, tokens)[1]["redis"] == 288
    assert len(tolerant.port.offered) == offered


class SlowPort(MemoryPort):
    """The first segment of a load takes its time: so much that a pause of this process changes nothing."""

    def __init__(self, stored: MemoryPort) -> None:
        super().__init__()
        self.segments = stored.segments

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        for number, sealed in enumerate(super().fetch(loads, deadline)):
            if number == 0:
                time.sleep(0.6)
            yield sealed


@pytest.mark.parametrize(
    ("fidelity", "recompute_s", "loaded"),
    [("tolerant", 0.3, 128), ("tolerant", 1e6, 384), ("tolerant", 0.0, 384), ("exact", 0.3, 384)],
    ids=["computing is faster", "loading is faster", "nobody knows", "exact prompts have no target"],
)
def test_a_load_that_misses_the_target_is_ended_where_computing_the_rest_is_faster(
    tolerant: LiveEngine, monkeypatch: pytest.MonkeyPatch, fidelity: str, recompute_s: float, loaded: int
) -> None:
    tokens = prompt(705, 400)
    answer, _ = ask_tolerant(tolerant, tokens)
    tolerant.port = SlowPort(tolerant.port)
    tolerant.clear_device()
    monkeypatch.setattr(tolerant.reuse.paths["whole"], "_ttft_target_s", 0.001)

    again, by_tier = ask_tolerant(tolerant, tokens, fidelity=fidelity, recompute_s=recompute_s)
    assert again == answer
    assert by_tier == {"device": 0, "cpu": 0, "redis": loaded, "recomputed": 400 - loaded}


def test_a_load_is_not_waited_for_longer_than_computing_it_would_hold_the_target(
    tolerant: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(706, 400)
    ask_tolerant(tolerant, tokens)
    monkeypatch.setattr(tolerant.reuse.paths["whole"], "_ttft_target_s", 100.0)
    deadlines = []
    for recompute_s in (0.0, 50.0, 80.0, 200.0):
        tolerant.clear_device()
        asked = time.monotonic()
        ask_tolerant(tolerant, tokens, recompute_s=recompute_s)
        deadlines.append(tolerant.port.last_deadline - asked)
    usual, early, earlier, hopeless = deadlines

    assert earlier < early < usual
    assert hopeless > early, "computing everything would miss it anyway"
