"""Models with states: a fresh engine loads what was stored and answers as one that computed it; damage is found."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from live_engine import PATIENCE_S, LiveEngine, usage
from memory_store import MemoryProfiles, MemoryStore
from tiny_models import STATE_KINDS, write_model
from vllm.model_executor.models import registry

from deployments.engine.resume.crossing import with_resumed
from deployments.protocol.engine_hints import EngineHints
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.segment_codecs import Coding, SegmentCodecs
from deployments.transfer import segment_copy
from kvmanager.extensions import plan_extensions
from kvmanager.extensions.states.landings import STATES, LandingQuery
from kvmanager.moves.directives import Offload, Outcome
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import read_header
from kvmanager.segments.keys import BlockHash, state_name
from kvmanager.segments.spans import NodeKind
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import HERE, BrainPort
from load_tests.harness.patience import patience, until
from tests.sizes import LONG

ANSWER = 24
BLOCK = 256
"""Large enough for the states of a layer, whichever the model."""
SEGMENT_BLOCKS = 2
FIRST = prompt(1, 1300)
PROMPTS = (FIRST, FIRST[:900] + prompt(2, 400), prompt(3, 1260), prompt(4, 1280))
"""By itself, parting from the first inside a block, another one, and one of whole blocks. Shorter ones than four blocks
are not stored at first sight."""
LANDINGS = (1280, 1280, 1024, 1024)
BEGINS = 3
"""The block in which last messages begin."""
FRESH = "nemotron-h"
"""Has another engine load what one stored. Others do in long runs; else theirs is emptied."""
TURN = 40
"""Tokens of a conversation's answer: it ends behind the end of the block in which its prompt ends."""


class StatePort(BrainPort):
    """A brain that plans for an engine with states, and says of a bad segment that it is."""

    def __init__(self) -> None:
        super().__init__(SEGMENT_BLOCKS, plan_extensions([STATES]), BLOCK)
        self.extras = {STATES: LandingQuery()}

    def report_bad(self, load: PlannedLoad, reason: str) -> None:
        self.bad.append(reason)


@dataclass
class World:
    """A model, an engine of it, what engines that computed all answered to `PROMPTS`, and what one of them stored."""

    engine: LiveEngine
    cold: list[list[int]]
    conversation: list[int]
    stored: StatePort

    def ask(self, tokens: Sequence[int]) -> tuple[list[int], dict[str, int]]:
        """The answer, and where the prompt's KV came from, with nothing on the device."""
        self.engine.clear_device()
        return self.again(tokens)

    def again(self, tokens: Sequence[int], answer: int = ANSWER) -> tuple[list[int], dict[str, int]]:
        """The same, with whatever the device has."""
        self.engine.port.prompt_tokens = len(tokens)
        return self.engine.ask(tokens, answer)


def start(model: Path, dtype: str) -> LiveEngine:
    return LiveEngine(
        model,
        dtype,
        segment_tokens=SEGMENT_BLOCKS * BLOCK,
        block_size_tokens=BLOCK,
        max_num_batched_tokens=1536,
    )


OTHERS = pytest.mark.long(
    "tests/deployments/engine/test_state_kv.py"
    "::test_a_fresh_engine_loads_what_was_stored_and_answers_as_one_that_computed_it"
)


@pytest.fixture(
    scope="module",
    # One of gated delta nets, and one of Mamba 2.
    params=[
        pytest.param(kind, id=kind, marks=[] if kind in ("qwen3-next", "nemotron-h") else [OTHERS])
        for kind in STATE_KINDS
    ],
)
def world(request: Any, tmp_path_factory: Any, own_engine: Any) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # vLLM starts a process for each class that it has never seen, which imports all of vLLM again.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        model = write_model(request.param, tmp_path_factory.mktemp("model"))
        dtype = STATE_KINDS[request.param][2]
        engine = own_engine.start(lambda: start(model, dtype), LiveEngine.close)
        cold: list[list[int]] = []
        talk = PROMPTS[2]
        said = engine.ask(talk, TURN, planned=False)[0]
        conversation = [*talk, *said, *prompt(6, 140)]
        for tokens in (*PROMPTS, conversation):
            engine.clear_device()
            answer, came = engine.ask(tokens, ANSWER, planned=False)
            assert came["recomputed"] == len(tokens)
            cold.append(answer)
        engine.port = stored = StatePort()
        for tokens in PROMPTS:
            engine.clear_device()
            stored.prompt_tokens = len(tokens)
            engine.ask(tokens, ANSWER)
        engine.clear_device()
        stored.prompt_tokens = len(talk)
        engine.ask(talk, TURN)
        if LONG or request.param == FRESH:
            engine = own_engine.start(lambda: start(model, dtype), LiveEngine.close)
        engine.port = stored
        yield World(engine, cold, conversation, stored)


@pytest.fixture(autouse=True)
def _whole(world: World) -> Iterator[None]:
    """Nothing is left of a test in the engine, and what it did to the port is undone."""
    segments = dict(world.stored.segments)
    yield
    world.stored.segments, world.stored.spoil = segments, lambda sealed: sealed
    world.engine.settle()
    assert world.engine.blocks_in_use() == 0
    assert world.engine.reuse.saves.held_blocks == 0


def test_a_fresh_engine_loads_what_was_stored_and_answers_as_one_that_computed_it(world: World) -> None:
    for tokens, said, landing in zip(PROMPTS, world.cold, LANDINGS, strict=False):
        again, came = world.ask(tokens)
        assert (again, came["cpu"]) == (said, landing)
        assert landing_of(world.stored, world, tokens) == landing, "a lookup says as much"


def landing_of(port: StatePort, world: World, tokens: Sequence[int]) -> int:
    found = port.brain.lookup(list(map(BlockHash, world.engine.hashes(tokens))), (len(tokens) - 1) // BLOCK)
    return int(found["landing"]) * BLOCK


@OTHERS
def test_thirty_prompts_are_loaded_and_answered_as_when_they_were_computed(world: World) -> None:
    prompts = [prompt(1000 + number, 1030 + 11 * number) for number in range(30)]
    world.stored.prompt_tokens = 0
    cold = []
    for tokens in prompts:
        world.engine.clear_device()
        cold.append(world.engine.ask(tokens, ANSWER, planned=False)[0])
    for tokens, said in zip(prompts, cold, strict=True):
        again, came = world.ask(tokens)
        assert (again, came["cpu"]) == (said, (len(tokens) - 1) // BLOCK * BLOCK)


def test_the_next_turn_loads_the_answer_of_the_last_one_too(world: World) -> None:
    """States of bfloat16 are rounded at each sampled token, not at each token of a prompt: near is all they can be."""
    said, came = world.ask(world.conversation)
    assert came["cpu"] == 1280, "the last boundary within the answer"
    if world.engine.llm.vllm_config.model_config.dtype == torch.float32:
        assert said == world.cold[-1]
        return
    likeliest = []
    for planned in (False, True):
        world.engine.clear_device()
        likeliest.append(logprobs(world, world.conversation, planned)[0][0])
    assert likeliest[1] == pytest.approx(likeliest[0], abs=0.2)


def test_a_prompt_that_parts_from_a_stored_one_leaves_states_there_for_the_next(world: World) -> None:
    tokens = [*FIRST[:600], *prompt(7, 700)]
    first, came = world.ask(tokens)
    assert came["recomputed"] == len(tokens)
    other = [*FIRST[:600], *prompt(8, 500)]
    loaded, came = world.ask(other)
    assert came["cpu"] == 512
    world.engine.port = BrainPort(SEGMENT_BLOCKS)
    try:
        assert world.ask(other)[0] == loaded
        assert world.ask(tokens)[0] == first
    finally:
        world.engine.port = world.stored


@pytest.fixture
def stored_names(world: World) -> Iterator[list[bytes]]:
    """The names of what is stored meanwhile, in that order, of prompts whose last messages begin in block `BEGINS`."""
    names: list[bytes] = []
    port = world.stored
    port.extras, port.on_store = {STATES: LandingQuery(BEGINS, SEGMENT_BLOCKS)}, names.append
    yield names
    port.extras, port.on_store = {STATES: LandingQuery()}, lambda key: None
    world.engine.port = port


def state_boundaries(world: World, tokens: Sequence[int], names: Sequence[bytes]) -> list[int]:
    """The blocks of a prompt at which its states are among these, each as often as it is there."""
    own = {state_name(each): end for end, each in enumerate(world.engine.hashes(tokens), start=1)}
    return sorted(own[name] for name in names if name in own)


def test_a_second_question_about_a_document_loads_all_of_it_and_answers_as_from_vllms_own_cache(
    world: World, stored_names: list[bytes]
) -> None:
    """The last messages begin inside a block, and end some blocks later."""
    document = prompt(20, BEGINS * BLOCK + 70)
    first, second = [*document, *prompt(21, 500)], [*document, *prompt(22, 450)]
    assert world.ask(first)[1]["recomputed"] == len(first)
    assert state_boundaries(world, first, stored_names) == [BEGINS, len(first) // BLOCK]
    world.engine.port = BrainPort(SEGMENT_BLOCKS)
    own, came = logprobs(world, second, planned=False)
    assert came["device"] == BEGINS * BLOCK, "vLLM keeps them where a step has ended for it"
    cold = world.ask(second)
    assert cold[1]["recomputed"] == len(second)
    world.engine.port = world.stored
    world.engine.clear_device()
    loaded, came = logprobs(world, second, planned=True)
    assert (loaded, came["cpu"]) == (own, BEGINS * BLOCK)
    assert state_boundaries(world, second, stored_names) == [BEGINS, len(second) // BLOCK], "at the document's end once"
    assert world.ask(second)[0] == cold[0]


def test_a_document_whose_questions_are_preempted_has_its_states_once_and_its_next_question_loads_them(
    world: World, stored_names: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = prompt(23, BEGINS * BLOCK + 10)
    questions = [[*document, *prompt(24 + number, 480)] for number in range(4)]
    world.stored.prompt_tokens = 0
    computed = [world.engine.ask(each, ANSWER, planned=False)[0] for each in questions]
    world.engine.clear_device()
    preempted = preemptions(world, monkeypatch)
    with few_blocks(world):
        runs = [world.engine.start(world.engine.answer(each, greedy(TURN))) for each in questions]
        answers = [list(run.result(patience(PATIENCE_S)).outputs[0].token_ids)[:ANSWER] for run in runs]
        world.engine.settle()
    assert preempted
    assert answers == computed
    assert len(stored_names) == len(set(stored_names)), "nothing is stored twice"
    another = [*document, *prompt(29, 300)]
    said, came = world.ask(another)
    assert came["cpu"] == BEGINS * BLOCK
    world.engine.clear_device()
    assert world.engine.ask(another, ANSWER, planned=False)[0] == said


@pytest.mark.parametrize("named", [0, 1, LANDINGS[0] // BLOCK, 6, 1 << 40, -1])
def test_of_a_block_at_which_no_more_states_are_worth_it_none_are_kept(
    world: World, stored_names: list[bytes], named: int
) -> None:
    """In the first block, at the prompt's own last landing, behind the prompt, and what no prompt has."""
    tokens = prompt(40 + named % 1000, 1300)
    world.stored.extras = {STATES: LandingQuery(named, SEGMENT_BLOCKS)}
    world.ask(tokens)
    assert state_boundaries(world, tokens, stored_names) == [LANDINGS[0] // BLOCK]
    world.stored.extras = {STATES: LandingQuery(4, SEGMENT_BLOCKS)}
    _, came = world.ask([*tokens, *prompt(39, 700)])
    assert came["cpu"] == LANDINGS[0]
    assert state_boundaries(world, tokens, stored_names) == [LANDINGS[0] // BLOCK], "one lies behind block 4 already"


def test_what_was_loaded_is_on_the_device_for_the_next_prompt(world: World) -> None:
    world.ask(FIRST)
    said, came = world.again(FIRST)
    assert (said, came["device"], came["cpu"]) == (world.cold[0], 1280, 0)


def test_what_redis_kept_over_a_restart_is_loaded(world: World) -> None:
    """Written by one worker, read by another one, and indexed by a manager that has asked for none of it."""
    fingerprint, kept, profiles = world.engine.fingerprint, MemoryStore(), MemoryProfiles()

    def worker() -> CodedStore:
        codecs = SegmentCodecs(Coding("lossless", "lossless"), profiles)
        return CodedStore(CheckedStore(kept, fingerprint), fingerprint, codecs, profiles, CodecMeter())

    writes, reads, port = worker(), worker(), StatePort()
    for key, (_, sealed) in world.stored.segments.items():
        writes.put(key, sealed)
    for key in world.stored.segments:
        raw = reads.get(key)
        assert raw is not None
        port.segments[key] = (read_header(raw).span, bytes(memoryview(raw)))
    found = sorted(port.segments.values(), key=lambda each: each[0].start_block)
    spans, sizes = [span for span, _ in found], [len(sealed) for _, sealed in found]
    assert len(port.brain.adopt(time.monotonic(), HERE, spans, sizes)) == len(spans)
    states = sum(span.kind is NodeKind.STATE for span, _ in world.stored.segments.values())
    assert 0 < states == port.brain.stats(time.monotonic())["locations"][0]["states"], "their heads say what they are"
    world.engine.port = port
    try:
        for tokens, said, landing in zip(PROMPTS, world.cold, LANDINGS, strict=False):
            world.engine.clear_device()
            port.prompt_tokens = len(tokens)
            again, came = world.engine.ask(tokens, ANSWER)
            assert (again, came["cpu"]) == (said, landing)
    finally:
        world.engine.port = world.stored


def logprobs(world: World, tokens: Sequence[int], planned: bool) -> tuple[list[float], dict[str, int]]:
    """Those of the tokens of a greedy answer, and where the prompt's KV came from."""
    world.engine.port.prompt_tokens = len(tokens)
    output = world.engine.run(world.engine.answer(tokens, greedy(ANSWER, logprobs=0), planned))
    world.engine.settle()
    said = output.outputs[0]
    found = [one[token].logprob for one, token in zip(said.logprobs, said.token_ids, strict=True)]
    return found, output.kv_transfer_params["crosskv"]


def preemptions(world: World, patch: pytest.MonkeyPatch) -> list[str]:
    """The requests that are preempted from now on."""
    preempted: list[str] = []
    preempt = world.engine.scheduler._preempt_request

    def counted(request: Any, *rest: Any, **more: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **more)

    patch.setattr(world.engine.scheduler, "_preempt_request", counted)
    return preempted


@contextlib.contextmanager
def few_blocks(world: World) -> Iterator[None]:
    """The device has room for one conversation of six blocks meanwhile."""
    engine = world.engine
    pool = engine.scheduler.kv_cache_manager.block_pool
    groups = len(engine.scheduler.connector.groups.windows)
    free = engine.on_engine_thread(pool.get_num_free_blocks)
    taken = engine.on_engine_thread(lambda: pool.get_new_blocks(free - 6 * groups))
    try:
        yield
    finally:
        engine.on_engine_thread(lambda: pool.free_blocks(taken))


def zero(patch: pytest.MonkeyPatch, copier: Any) -> None:
    """Have zeros come in the place of what a copier has stored."""
    spoiled = {id(layer) for layer in copier.layers}
    scatter = segment_copy.scatter

    def spoiling(layers: Sequence[torch.Tensor], ids: Any, layout: Any, values: torch.Tensor) -> None:
        scatter(layers, ids, layout, values * 0 if id(layers[0]) in spoiled else values)

    patch.setattr(segment_copy, "scatter", spoiling)


@pytest.mark.parametrize("damaged", ["states", "tokens"])
def test_one_token_behind_a_landing_is_answered_bit_by_bit_as_from_vllms_own_cache_and_zeros_change_it(
    world: World, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else equal answers would show nothing. The first token's logprob needs any state, also that of a short
    convolution, which holds two tokens and has left them behind soon."""
    tokens = FIRST[: LANDINGS[0] + 1]
    world.engine.clear_device()
    assert logprobs(world, tokens, planned=False)[1]["device"] == 0
    cached, came = logprobs(world, tokens, planned=False)
    assert came["device"] == LANDINGS[0]
    world.engine.clear_device()
    loaded, came = logprobs(world, tokens, planned=True)
    assert (loaded, came["cpu"]) == (cached, LANDINGS[0])
    zero(monkeypatch, world.engine.reuse.states if damaged == "states" else world.engine.reuse.copier)
    world.engine.clear_device()
    without, came = logprobs(world, tokens, planned=True)
    monkeypatch.undo()
    world.engine.clear_device()
    assert came["cpu"] == LANDINGS[0]
    assert without[0] != cached[0]


@pytest.mark.parametrize("segment", ["tokens", "states"])
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_segment_that_does_not_come_as_it_was_stored_has_the_prompt_computed(
    world: World, segment: str, how: str
) -> None:
    fetched = 0
    at = 1 if segment == "tokens" else 4

    def spoil(sealed: bytes) -> bytes | None:
        nonlocal fetched
        fetched += 1
        if fetched != at:
            return sealed
        return sealed[:-1] + bytes([sealed[-1] ^ 1]) if how == "damaged" else None

    world.stored.bad.clear()
    world.stored.spoil = spoil
    said, came = world.ask(FIRST)
    assert fetched == at, "of three segments of tokens and one of states"
    assert bool(world.stored.bad) == (how == "damaged")
    assert (said, came["recomputed"]) == (world.cold[0], len(FIRST))


def test_requests_together_that_are_preempted_answer_as_alone_and_leave_nothing_held(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, preempted = world.engine, preemptions(world, monkeypatch)
    engine.clear_device()
    world.stored.prompt_tokens = 0
    with few_blocks(world):
        runs = [engine.start(engine.answer(PROMPTS[2], greedy(TURN))) for _ in range(3)]
        answers = [list(run.result(patience(PATIENCE_S)).outputs[0].token_ids)[:ANSWER] for run in runs]
        engine.settle()
    assert preempted
    assert answers == [world.cold[2]] * 3
    said, _ = world.ask(PROMPTS[2])
    assert said == world.cold[2], "what was stored meanwhile"


@pytest.fixture
def said(world: World) -> list[int]:
    """The answer of the stored conversation: of states of bfloat16 its beginning, for the rest is only near."""
    exact = world.engine.llm.vllm_config.model_config.dtype == torch.float32
    return world.conversation[len(PROMPTS[2]) :][: TURN if exact else 1]


@pytest.mark.parametrize("computed", [1279, 1280, 1281])
def test_a_request_that_is_preempted_at_a_blocks_end_or_next_to_it_answers_as_alone(
    world: World, said: list[int], computed: int
) -> None:
    world.stored.prompt_tokens = len(PROMPTS[2])
    world.engine.clear_device()
    with world.engine.preempting(computed) as preempted:
        again = world.engine.ask(PROMPTS[2], TURN, planned=False)[0]
    assert preempted == [computed]
    assert again[: len(said)] == said
    assert world.engine.reuse.saves.held_blocks == 0
    again, came = world.ask(PROMPTS[2])
    assert (again, came["cpu"]) == (world.cold[2], LANDINGS[2])


@pytest.mark.parametrize(
    ("after", "landing"), [(1, 1024), (30, 1280)], ids=["that a prefill replica began", "whose replica is gone"]
)
def test_a_stream_goes_on_in_another_engine_with_the_states_of_its_first(
    world: World, said: list[int], after: int, landing: int
) -> None:
    """A hand-over between roles, and a replica's death: both are a stream that has answered some tokens elsewhere."""
    talk = PROMPTS[2]
    answered = world.conversation[len(talk) :][:after]
    world.stored.prompt_tokens = len(talk) + after
    hints = EngineHints(world.stored.plan(world.engine.hashes([*talk, *answered])))
    params = greedy(TURN, extra_args=with_resumed({"kv_transfer_params": hints.as_transfer()}, answered))
    asked: Any = {"type": "token", "prompt_token_ids": talk, "cache_salt": world.engine.salt}
    world.engine.clear_device()

    async def read() -> Any:
        return [output async for output in world.engine.llm.generate(asked, params, f"moved-{after}")][-1]

    output = world.engine.run(read())
    assert usage(output)["cpu"] == landing
    assert list(output.outputs[0].token_ids)[: len(said)] == said


def test_no_tenant_finds_another_ones_states_on_the_device_or_in_a_tier(world: World) -> None:
    world.ask(FIRST)
    with world.engine.acting_for("acme"):
        said, came = world.again(FIRST)
        assert (said, came["recomputed"]) == (world.cold[0], len(FIRST))
        said, came = world.ask(FIRST)
        assert (said, came["cpu"]) == (world.cold[0], LANDINGS[0]), "its own"


def test_directives_that_move_kv_without_a_request_are_refused_and_an_eviction_is_carried_out(world: World) -> None:
    engine, port = world.engine, world.stored
    engine.clear_device()
    assert engine.onboard(FIRST).result(patience(PATIENCE_S)).outcome is Outcome.REFUSED_MODEL
    assert engine.blocks_in_use() == 0
    world.again(FIRST)
    spans = [span for span, _ in port.segments.values() if span.start_block == 0]
    assert engine.direct(Offload(tuple(spans[:1]))).result(patience(PATIENCE_S)).outcome is Outcome.REFUSED_MODEL
    assert engine.evict(engine.hashes(FIRST)).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    said, came = world.again(FIRST)
    assert (said, came["device"], came["cpu"]) == (world.cold[0], 0, LANDINGS[0])


def test_a_device_that_is_cleared_while_states_are_held_changes_no_answer(world: World) -> None:
    engine, core = world.engine, world.engine.thread.core
    engine.clear_device()
    step, cleared = core.step_fn, list[int]()

    def clearing() -> Any:
        if engine.reuse.saves.held_blocks and len(cleared) < 3:
            cleared.append(engine.reuse.saves.held_blocks)
            _, following = engine.reuse.control.clear()
            while following:
                _, following = engine.reuse.control.clear(None, following)
        return step()

    tokens = prompt(50, 1100)
    engine.on_engine_thread(lambda: setattr(core, "step_fn", clearing))
    try:
        computed = engine.ask(tokens, ANSWER, planned=False)[0]
    finally:
        engine.on_engine_thread(lambda: setattr(core, "step_fn", step))
    assert cleared
    said, came = world.ask(tokens)
    assert (said, came["cpu"]) == (computed, 1024), "what was held was stored, and is what it was"
    port, world.engine.port = world.engine.port, BrainPort(SEGMENT_BLOCKS)
    try:
        assert world.ask(tokens) == (computed, {"device": 0, "cpu": 0, "redis": 0, "recomputed": len(tokens)})
    finally:
        world.engine.port = port


def test_states_that_are_given_up_are_counted_and_change_no_answer(world: World) -> None:
    engine, core = world.engine, world.engine.thread.core
    engine.clear_device()
    step, held = core.step_fn, list[int]()

    def giving_up() -> Any:
        if engine.reuse.saves.held_blocks and not held:
            held.append(engine.reuse.saves.held_blocks)
            engine.reuse.saves.make_room()
        return step()

    def given_up() -> float:
        (family,) = engine.reuse.saves.families()
        return {sample.labels["reason"]: sample.value for sample in family.samples}["room"]

    before = given_up()
    engine.on_engine_thread(lambda: setattr(core, "step_fn", giving_up))
    try:
        said, _ = engine.ask(PROMPTS[2], ANSWER, planned=False)
    finally:
        engine.on_engine_thread(lambda: setattr(core, "step_fn", step))
    assert held
    assert (said, given_up() - before) == (world.cold[2], 1)


def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_ends(world: World) -> None:
    engine, reached, go_on = world.engine, threading.Event(), threading.Event()
    engine.clear_device()
    world.stored.prompt_tokens = len(FIRST)

    def wait() -> None:
        reached.set()
        assert go_on.wait(patience(PATIENCE_S))

    world.stored.before_fetch = wait
    try:
        waiting = engine.start(engine.answer(FIRST, greedy(ANSWER)))
        assert reached.wait(patience(PATIENCE_S))
        waiting.cancel()
        until(lambda: engine.on_engine_thread(engine.scheduler.get_num_unfinished_requests) == 0, "it is gone")
        assert engine.blocks_in_use() > 0, "the load still writes into them"
    finally:
        world.stored.before_fetch = lambda: None
        go_on.set()
    until(lambda: engine.blocks_in_use() == 0, "its blocks are free")
    said, came = world.ask(FIRST)
    assert (said, came["cpu"]) == (world.cold[0], LANDINGS[0])
