"""Models with windows: a fresh engine loads what was stored and answers as one that computed it; damage is found."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from live_engine import PATIENCE_S, SEGMENT_BLOCKS, LiveEngine, usage
from memory_store import MemoryProfiles, MemoryStore
from tiny_models import KINDS, write_model
from vllm.model_executor.models import registry

from deployments.engine.resume.crossing import with_resumed
from deployments.protocol.engine_hints import EngineHints
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.segment_codecs import Coding, SegmentCodecs
from deployments.transfer import segment_copy
from kvmanager.config import ManagerConfig
from kvmanager.manager import KVManager
from kvmanager.moves.directives import Offload, Outcome
from kvmanager.moves.plan import LANDINGS
from kvmanager.segments.keys import TOLERANT, SegmentKey, cache_salt
from load_tests.harness.engine import SECRET, greedy, prompt
from load_tests.harness.memory_port import HERE, BrainPort, MemoryPort
from load_tests.harness.patience import patience, until
from tests.sizes import LONG

ANSWER = 24
BLOCK = 32
FIRST = prompt(1, 1000)
PROMPTS = (
    FIRST,
    FIRST[:768] + prompt(2, 150),
    prompt(3, 300),
    FIRST[:70] + prompt(4, 50),
    prompt(5, 160),
)
"""Parting from the first behind a window, by itself, within a window and shorter than one, and of whole blocks."""
FRESH = "gemma, window of 136"
"""Has another engine load what one stored. Others do in long runs; else theirs is emptied."""
TURN = 140
"""Tokens of a conversation's answer: more than a window."""


@dataclass
class World:
    """A model, an engine of it, what another engine answered to `PROMPTS`, and what that one stored."""

    model: Path
    engine: LiveEngine
    cold: list[list[int]]
    conversation: list[int]
    stored: dict[bytes, Any]

    def refill(self) -> None:
        """Nothing on the device; all in the port that was stored."""
        self.engine.clear_device()
        self.engine.port.segments = dict(self.stored)
        self.engine.port.spoil = lambda sealed: sealed

    def ask(self, tokens: Sequence[int]) -> tuple[list[int], dict[str, int]]:
        """The answer, and where the prompt's KV came from."""
        return self.engine.ask(tokens, ANSWER)


OTHERS = pytest.mark.long(
    "tests/deployments/engine/test_window_kv.py"
    "::test_a_fresh_engine_loads_what_was_stored_and_answers_as_one_that_computed_it"
)


@pytest.fixture(
    scope="module",
    # One with a window that is no multiple of a block and layers without one, and one of windows alone.
    params=[
        pytest.param(kind, id=kind, marks=[] if kind in ("gemma, window of 136", "mistral") else [OTHERS])
        for kind in KINDS
    ],
)
def world(request: Any, tmp_path_factory: Any, own_engine: Any) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # vLLM starts a process for each class that it has never seen, which imports all of vLLM again.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        model = write_model(request.param, tmp_path_factory.mktemp("model"))
        engine = own_engine.start(lambda: LiveEngine(model, "float32"), LiveEngine.close)
        cold: list[list[int]] = []
        for tokens in PROMPTS:
            engine.clear_device()
            said, came = engine.ask(tokens, ANSWER, planned=False)
            assert came["recomputed"] == len(tokens)
            cold.append(said)
        talk = PROMPTS[2]
        engine.clear_device()
        said, _ = engine.ask(talk, TURN, planned=False)
        conversation = [*talk, *said, *prompt(6, 40)]
        stored = dict(engine.port.segments)
        engine.clear_device()
        cold.append(engine.ask(conversation, ANSWER, planned=False)[0])
        if LONG or request.param == FRESH:
            engine = own_engine.start(lambda: LiveEngine(model, "float32"), LiveEngine.close)
        engine.port = MemoryPort()
        yield World(model, engine, cold, conversation, stored)


def test_a_fresh_engine_loads_what_was_stored_and_answers_as_one_that_computed_it(world: World) -> None:
    assert world.engine.reuse.terms == {LANDINGS: True}
    assert world.engine.reuse.paths["preempted"].needs_landing
    world.refill()
    for tokens, said in zip(PROMPTS, world.cold, strict=False):
        world.engine.clear_device()
        assert world.ask(tokens)[0] == said
    world.refill()
    loaded = [world.ask(tokens)[1]["cpu"] for tokens in PROMPTS]
    assert loaded == [992, 896, 288, 96, 128]


@OTHERS
def test_thirty_prompts_are_loaded_and_answered_as_when_they_were_computed(world: World) -> None:
    world.refill()
    prompts = [prompt(1000 + number, 200 + 23 * number) for number in range(30)]
    cold = []
    for tokens in prompts:
        world.engine.clear_device()
        cold.append(world.engine.ask(tokens, ANSWER, planned=False)[0])
    for tokens, said in zip(prompts, cold, strict=True):
        world.engine.clear_device()
        again, came = world.ask(tokens)
        assert (again, came["cpu"]) == (said, (len(tokens) - 1) // BLOCK * BLOCK)


def test_the_next_turn_loads_the_answer_of_the_last_one_too(world: World) -> None:
    world.refill()
    said, came = world.ask(world.conversation)
    assert said == world.cold[-1]
    assert came["cpu"] == (len(PROMPTS[2]) + TURN - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("seed", range(3))
def test_where_prompts_part_a_tier_has_what_the_device_has_not(world: World, seed: int) -> None:
    """vLLM keeps windows where a prompt ends, and none where another one parts from it. A tier keeps all blocks."""
    draw = random.Random(seed)
    shared, *tails = (prompt(10 * seed + n, draw.randrange(150, 400)) for n in (100, 101, 102))
    first, second = ([*shared, *tail] for tail in tails)
    world.refill()
    world.engine.port.segments.clear()
    world.engine.ask(first, 1, planned=False)
    stored = dict(world.engine.port.segments)
    said, own = world.engine.ask(second, ANSWER, planned=False)
    world.engine.clear_device()
    world.engine.port.segments = stored
    again, came = world.ask(second)
    assert again == said
    assert (own["device"], came["cpu"]) == (0, len(shared) // BLOCK * BLOCK)


def test_what_was_loaded_is_on_the_device_for_the_next_prompt(world: World) -> None:
    world.refill()
    world.ask(FIRST)
    said, came = world.ask(FIRST)
    assert (said, came["device"], came["cpu"]) == (world.cold[0], 992, 0)


@pytest.mark.parametrize("damaged", ["windows", "all layers"])
def test_zeroed_layers_change_the_answer(world: World, damaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else equal answers would show nothing."""
    engine = world.engine
    copier = engine.reuse.copier
    windows = engine.scheduler.connector.groups.windows
    spoiled = {
        id(copier.layers[layer])
        for layers, group in copier.group_runs
        for layer in layers
        if damaged != "windows" or windows[group] is not None
    }
    scatter = segment_copy.scatter

    def spoiling(layers: Sequence[torch.Tensor], ids: Any, layout: Any, values: torch.Tensor) -> None:
        scatter(layers, ids, layout, values * 0 if id(layers[0]) in spoiled else values)

    monkeypatch.setattr(segment_copy, "scatter", spoiling)
    answers = []
    for tokens in PROMPTS[:3]:
        world.refill()
        answers.append(world.ask(tokens)[0])
    monkeypatch.undo()
    engine.clear_device()
    assert all(wrong != said for wrong, said in zip(answers, world.cold, strict=False))


def test_a_segment_that_is_not_what_was_stored_has_the_prompt_computed(world: World) -> None:
    world.refill()
    fetched = 0

    def spoil(sealed: bytes) -> bytes:
        nonlocal fetched
        fetched += 1
        return sealed if fetched < 3 else sealed[:-1] + bytes([sealed[-1] ^ 1])

    world.engine.port.spoil = spoil
    world.engine.port.bad.clear()
    said, came = world.ask(FIRST)
    assert world.engine.port.bad
    assert (said, came["recomputed"]) == (world.cold[0], len(FIRST))
    assert world.engine.blocks_in_use() == 0


def test_a_tier_that_brings_nothing_has_the_prompt_computed(world: World) -> None:
    world.refill()
    world.engine.port.spoil = lambda sealed: None
    said, came = world.ask(PROMPTS[1])
    assert (said, came["recomputed"]) == (world.cold[1], len(PROMPTS[1]))


def test_a_managers_brain_has_it_stored_and_plans_it_as_any_other_kv(world: World) -> None:
    world.engine.port = BrainPort(SEGMENT_BLOCKS)
    try:
        for loaded in (0, 896):
            world.engine.clear_device()
            assert world.ask(FIRST)[0] == world.cold[0]
            world.engine.clear_device()
            said, came = world.ask(PROMPTS[1])
            assert said == world.cold[1]
            assert came["cpu"] >= max(loaded, 768)
    finally:
        world.engine.clear_device()
        world.engine.port = MemoryPort()


def test_requests_together_that_are_preempted_answer_as_alone_and_leave_nothing_held(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def counted(request: Any, *rest: Any, **more: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **more)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", counted)
    world.refill()
    engine.port.segments.clear()
    free = engine.on_engine_thread(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks)
    pool = engine.scheduler.kv_cache_manager.block_pool
    groups = len(engine.scheduler.connector.groups.windows)
    taken = engine.on_engine_thread(lambda: pool.get_new_blocks(free - 20 * groups))
    try:
        runs = [engine.start(engine.answer(tokens, greedy(TURN))) for tokens in PROMPTS[2:] * 2]
        answers = [list(run.result(patience(60.0)).outputs[0].token_ids)[:ANSWER] for run in runs]
        engine.settle()
    finally:
        engine.on_engine_thread(lambda: pool.free_blocks(taken))
    assert preempted
    assert answers == world.cold[2 : len(PROMPTS)] * 2
    assert engine.blocks_in_use() == 0
    assert engine.reuse.saves.held_blocks == 0
    engine.clear_device()
    assert [world.ask(tokens)[0] for tokens in PROMPTS] == world.cold[: len(PROMPTS)], "what was stored meanwhile"


@pytest.mark.parametrize("computed", [319, 320, 321])
def test_a_request_that_is_preempted_at_a_blocks_end_or_next_to_it_answers_as_alone(
    world: World, computed: int
) -> None:
    world.refill()
    world.engine.port.segments.clear()
    with world.engine.preempting(computed) as preempted:
        said = world.engine.ask(PROMPTS[2], TURN)[0]
    assert preempted == [computed]
    assert [*PROMPTS[2], *said] == world.conversation[: len(PROMPTS[2]) + TURN]
    assert (world.engine.reuse.saves.held_blocks, world.engine.blocks_in_use()) == (0, 0)
    world.engine.clear_device()
    assert world.ask(world.conversation)[0] == world.cold[-1], "whatever was stored meanwhile"


@pytest.mark.parametrize("after", [1, 100], ids=["that a prefill replica began", "whose replica is gone"])
def test_a_stream_goes_on_in_another_engine_with_the_kv_of_its_first(world: World, after: int) -> None:
    """A hand-over between roles, and a replica's death: both are a stream that has answered some tokens elsewhere."""
    world.refill()
    talk, said = PROMPTS[2], world.conversation[len(PROMPTS[2]) : len(PROMPTS[2]) + TURN]
    hints = EngineHints(world.engine.port.plan(world.engine.hashes([*talk, *said[:after]])))
    params = greedy(TURN, extra_args=with_resumed({"kv_transfer_params": hints.as_transfer()}, said[:after]))

    asked: Any = {"type": "token", "prompt_token_ids": talk, "cache_salt": world.engine.salt}

    async def read() -> Any:
        return [output async for output in world.engine.llm.generate(asked, params, f"moved-{after}")][-1]

    output = world.engine.run(read())
    assert list(output.outputs[0].token_ids) == said
    assert usage(output)["cpu"] == (len(talk) + after - 1) // BLOCK * BLOCK


def test_a_prefill_replica_stores_a_whole_prompt_with_its_first_token(world: World) -> None:
    world.refill()
    world.engine.port.segments.clear()
    world.engine.ask(FIRST, 1)
    world.engine.clear_device()
    said, came = world.ask(FIRST)
    assert (said, came["cpu"]) == (world.cold[0], 992)


def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_ends(world: World) -> None:
    engine, reached, go_on = world.engine, threading.Event(), threading.Event()
    world.refill()

    def wait() -> None:
        reached.set()
        assert go_on.wait(patience(PATIENCE_S))

    engine.port.before_fetch = wait
    try:
        waiting = engine.start(engine.answer(FIRST, greedy(ANSWER)))
        assert reached.wait(patience(PATIENCE_S))
        waiting.cancel()
        until(lambda: engine.on_engine_thread(engine.scheduler.get_num_unfinished_requests) == 0, "it is gone")
        assert engine.blocks_in_use() > 0, "the load still writes into them"
    finally:
        engine.port.before_fetch = lambda: None
        go_on.set()
    until(lambda: engine.blocks_in_use() == 0, "its blocks are free")
    assert engine.reuse.saves.held_blocks == 0
    assert world.ask(FIRST)[0] == world.cold[0]


def test_a_device_that_is_cleared_while_windows_are_held_changes_no_answer(world: World) -> None:
    engine, core = world.engine, world.engine.thread.core
    world.refill()
    engine.port.segments.clear()
    step, cleared = core.step_fn, list[int]()

    def clearing() -> Any:
        if engine.reuse.saves.held_blocks and len(cleared) < 3:
            cleared.append(engine.reuse.saves.held_blocks)
            following = 1
            while following:
                following = engine.reuse.control.clear(None, following if following > 1 else 0)[1]
        return step()

    engine.on_engine_thread(lambda: setattr(core, "step_fn", clearing))
    try:
        said = engine.ask(PROMPTS[2], TURN)[0]
    finally:
        engine.on_engine_thread(lambda: setattr(core, "step_fn", step))
    assert len(cleared) == 3
    assert [*PROMPTS[2], *said] == world.conversation[: len(PROMPTS[2]) + TURN]
    assert (engine.reuse.saves.held_blocks, engine.blocks_in_use()) == (0, 0)
    engine.clear_device()
    said, came = world.ask(world.conversation)
    assert (said, came["cpu"]) == (world.cold[-1], (len(PROMPTS[2]) + TURN - 1) // BLOCK * BLOCK)


def test_directives_that_move_kv_without_a_request_are_refused_and_an_eviction_is_carried_out(world: World) -> None:
    engine = world.engine
    world.refill()
    assert engine.onboard(FIRST).result(patience(PATIENCE_S)).outcome is Outcome.REFUSED_MODEL
    assert engine.blocks_in_use() == 0
    world.ask(FIRST)
    spans = sorted((span for span, _ in engine.port.segments.values()), key=lambda span: span.start_block)
    engine.port.segments.clear()
    assert engine.direct(Offload(tuple(spans[:1]))).result(patience(PATIENCE_S)).outcome is Outcome.REFUSED_MODEL
    assert engine.port.segments == {}
    assert engine.evict(engine.hashes(FIRST)).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    engine.port.segments = dict(world.stored)
    said, came = world.ask(FIRST)
    assert (said, came["device"], came["cpu"]) == (world.cold[0], 0, 992)


def test_a_tolerant_prompt_is_stored_with_loss_and_loaded(world: World) -> None:
    engine = world.engine
    world.refill()
    fingerprint, kept, profiles = engine.fingerprint, MemoryStore(), MemoryProfiles()
    salt, exact = cache_salt(SECRET, fingerprint, "", TOLERANT), engine.salt
    codecs = SegmentCodecs(Coding("lossless", "cachegen", 2), profiles)
    store = CodedStore(CheckedStore(kept, fingerprint), fingerprint, codecs, profiles, CodecMeter())
    tokens = prompt(9, 400)

    def ask() -> dict[str, int]:
        hints = EngineHints(engine.port.plan(engine.hashes(tokens)), fidelity=TOLERANT)

        async def read() -> Any:
            return [output async for output in engine.generate(tokens, greedy(ANSWER), hints, salt)][-1]

        found = usage(engine.run(read()))
        engine.settle()
        return found

    engine.port.segments.clear()
    engine.salt = salt
    try:
        assert ask()["recomputed"] == len(tokens)
        stored = dict(engine.port.segments)
        for key, (span, sealed) in stored.items():
            store.put(key, sealed)
            assert len(kept.held[key]) < 0.7 * len(sealed)
            raw = store.get(key)
            assert raw is not None
            engine.port.segments[key] = (span, bytes(memoryview(raw)))
        assert any(engine.port.segments[key][1] != sealed for key, (_, sealed) in stored.items()), "with loss"
        engine.clear_device()
        assert ask()["cpu"] == 384
    finally:
        engine.salt = exact
    assert engine.port.bad == []


def test_no_tenant_finds_another_ones_kv_on_the_device_or_in_a_tier(world: World) -> None:
    world.refill()
    world.ask(FIRST)
    with world.engine.acting_for("acme"):
        said, came = world.ask(FIRST)
        assert (said, came["recomputed"]) == (world.cold[0], len(FIRST))
        world.engine.clear_device()
        said, came = world.ask(FIRST)
        assert (said, came["cpu"]) == (world.cold[0], 992), "its own"


def test_what_redis_kept_without_loss_over_a_restart_is_loaded(world: World) -> None:
    """Coded by one worker, decoded by another one, of another life of the manager."""
    fingerprint, kept, profiles = world.engine.fingerprint, MemoryStore(), MemoryProfiles()

    def worker() -> CodedStore:
        codecs = SegmentCodecs(Coding("lossless", "lossless"), profiles)
        return CodedStore(CheckedStore(kept, fingerprint), fingerprint, codecs, profiles, CodecMeter())

    writes, reads = worker(), worker()
    for key, (_, sealed) in world.stored.items():
        writes.put(key, sealed)
    assert any(len(kept.held[key]) < len(sealed) for key, (_, sealed) in world.stored.items()), "something was coded"
    world.refill()
    for key, (span, _) in world.stored.items():
        raw = reads.get(key)
        assert raw is not None
        world.engine.port.segments[key] = (span, bytes(memoryview(raw)))
    for tokens, said, loaded in zip(PROMPTS, world.cold, (992, 896, 288, 96, 128), strict=False):
        world.engine.clear_device()
        assert world.ask(tokens) == (said, {"device": 0, "cpu": loaded, "redis": 0, "recomputed": len(tokens) - loaded})


def test_a_lookup_says_where_a_prompt_lies_and_a_pin_holds_all_of_it(world: World) -> None:
    world.engine.port = port = BrainPort(SEGMENT_BLOCKS)
    port.brain = KVManager(ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS, pin_budget_bytes=1 << 40), epoch=1)
    port.brain.set_budget(HERE, 1 << 40)
    try:
        world.engine.clear_device()
        world.ask(FIRST)
        names = world.engine.hashes(FIRST)
        found = port.brain.lookup(names)
        whole = None in world.engine.scheduler.connector.groups.windows
        assert (found["cpu"], found["device"].get("replica", 0)) == (31, 31 if whole else 0)
        last = SegmentKey(bytes.fromhex(found["segments"][-1]["key"]))
        report = port.brain.pin(time.monotonic(), [last], 60.0)
        assert report.segments == len(found["segments"])
        assert report.nbytes == sum(len(sealed) for _, sealed in port.segments.values())
        assert all(segment["pinned"] for segment in port.brain.lookup(names)["segments"])
    finally:
        world.engine.clear_device()
        world.engine.port = MemoryPort()
