"""Models with windows: a fresh engine loads what was stored and answers as one that computed it; damage is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from live_engine import SEGMENT_BLOCKS, LiveEngine
from tiny_models import KINDS, write_model
from vllm.model_executor.models import registry

from deployments.transfer import segment_copy
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import BrainPort, MemoryPort

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
"""Parting from the first behind a window and within one, by itself, and of whole blocks."""
TURN = 200
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
        pytest.param(kind, id=kind, marks=[] if kind in ("gemma, window of 200", "mistral") else [OTHERS])
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
        engine = own_engine.start(lambda: LiveEngine(model, "float32"), LiveEngine.close)
        engine.port = MemoryPort()
        yield World(model, engine, cold, conversation, stored)


def test_a_fresh_engine_loads_what_was_stored_and_answers_as_one_that_computed_it(world: World) -> None:
    world.refill()
    for tokens, said in zip(PROMPTS, world.cold, strict=False):
        world.engine.clear_device()
        assert world.ask(tokens)[0] == said
    world.refill()
    loaded = [world.ask(tokens)[1]["cpu"] for tokens in PROMPTS]
    assert loaded == [992, 896, 288, 96, 128]


def test_the_next_turn_loads_the_answer_of_the_last_one_too(world: World) -> None:
    world.refill()
    said, came = world.ask(world.conversation)
    assert said == world.cold[-1]
    assert came["cpu"] == (len(PROMPTS[2]) + TURN - 1) // BLOCK * BLOCK


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
    taken = engine.on_engine_thread(lambda: pool.get_new_blocks(free - 24 * groups))
    try:
        runs = [engine.start(engine.answer(tokens, greedy(TURN))) for tokens in PROMPTS[2:] * 3]
        answers = [list(run.result(60.0).outputs[0].token_ids)[:ANSWER] for run in runs]
        engine.settle()
    finally:
        engine.on_engine_thread(lambda: pool.free_blocks(taken))
    assert preempted
    assert answers == world.cold[2 : len(PROMPTS)] * 3
    assert engine.blocks_in_use() == 0
    assert engine.reuse.windows.blocks == 0
    engine.clear_device()
    assert [world.ask(tokens)[0] for tokens in PROMPTS] == world.cold[: len(PROMPTS)], "what was stored meanwhile"
