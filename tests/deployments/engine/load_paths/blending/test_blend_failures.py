"""Whatever happens to a blend or its chunks, the request ends, no wrong KV is used, and every block comes back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from blended_prompts import ChunkedPrompt, answer_of, ask, chunked, last_of, parts, store
from live_engine import BLOCK, PATIENCE_S, LiveEngine

from deployments.engine.load_paths.blending import queue as queue_module
from deployments.engine.load_paths.blending.model import BlendModel
from kvmanager.extensions.blend.chunks import BLEND
from kvmanager.moves.plan import PlanExpectation
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import LEASE_ID
from load_tests.harness.patience import patience, until

ONE = chunked(40, 37, [130, 257, 100], 30)


@pytest.fixture
def answer(engine: LiveEngine) -> list[int]:
    """What is answered when all is computed; the port holds the chunks afterwards."""
    found, _ = engine.ask(ONE.tokens)
    engine.port.segments.clear()
    engine.clear_device()
    store(engine, ONE)
    return found


@pytest.fixture
def gate(engine: LiveEngine) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Fetches stop there: reached, and opened."""
    reached, opened = threading.Event(), threading.Event()

    def stall() -> None:
        reached.set()
        assert opened.wait(patience(PATIENCE_S))

    engine.port.before_fetch = stall
    yield reached, opened
    opened.set()


def outcomes(engine: LiveEngine, name: str) -> int:
    return engine.reuse.paths["blend"].counters.outcomes[name]


def spoil_fetch(index: int, change: Callable[[bytes], bytes | None]) -> Callable[[bytes], bytes | None]:
    position = -1

    def spoil(sealed: bytes) -> bytes | None:
        nonlocal position
        position += 1
        return change(sealed) if position == index else sealed

    return spoil


def damaged(sealed: bytes) -> bytes:
    spoiled = bytearray(sealed)
    spoiled[-1] ^= 1
    return bytes(spoiled)


@pytest.mark.parametrize(
    ("change", "bad"), [(damaged, ["checksum"]), (lambda sealed: None, [])], ids=["damaged", "evicted"]
)
def test_from_a_segment_that_is_not_there_on_a_chunk_is_computed(
    engine: LiveEngine, answer: list[int], change: Callable[[bytes], bytes | None], bad: list[str]
) -> None:
    engine.port.spoil = spoil_fetch(2, change)  # the second of the second chunk's two segments

    found = ask(engine, ONE, ratio=0.0)

    assert parts(engine).reused == 128 + 128 + 96
    assert found.blended == parts(engine).reused
    assert engine.port.bad == bad
    assert engine.port.released.count(LEASE_ID) >= 1


def test_a_chunk_of_which_nothing_came_does_not_end_the_others(engine: LiveEngine, answer: list[int]) -> None:
    engine.port.spoil = spoil_fetch(0, lambda sealed: None)
    ask(engine, ONE, ratio=0.0)
    assert parts(engine).reused == 249 + 7 + 96


def test_a_document_that_stands_in_a_prompt_twice_is_reused_twice(engine: LiveEngine) -> None:
    twice = chunked(41, 37, [130, 140], 30)
    again = len(twice.tokens)
    first = twice.chunks[0]
    tokens = [*twice.tokens, *twice.tokens[first.start : first.stop], *prompt(9, 20)]
    store(engine, twice)

    found = ask(engine, ChunkedPrompt(tokens, [*twice.chunks, range(again, again + len(first))]), ratio=0.0)

    assert found.blended == parts(engine).reused == 3 * 128


def test_when_nothing_comes_in_time_the_answer_is_that_of_a_prefill(
    engine: LiveEngine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    side: Any = engine.scheduler.connector._scheduler_side
    monkeypatch.setattr(side, "_load_deadline_s", 0.0)
    found = ask(engine, ONE)
    assert (found.tokens, found.blended) == (answer, 0)
    assert parts(engine).uncached == parts(engine).rows


def test_behind_a_tier_that_hangs_blends_do_not_each_wait_anew(
    engine: LiveEngine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    side: Any = engine.scheduler.connector._scheduler_side
    others = [chunked(45 + number, 20, [160], 40) for number in range(3)]
    wanted = [engine.ask(one.tokens)[0] for one in others]
    for one in others:
        store(engine, one)
    monkeypatch.setattr(side, "_load_deadline_s", 1.0)
    come = threading.Event()

    def hang() -> None:
        """All of them are there by then; and then nothing comes until the time of who asked is over."""
        assert come.wait(patience(PATIENCE_S))
        until(lambda: time.monotonic() >= engine.port.last_deadline, "the deadline passes")

    engine.port.before_fetch = hang
    engine.port.spoil = lambda sealed: None
    fetches, late, failed = engine.port.fetches, outcomes(engine, "late"), outcomes(engine, "failed")
    plans = [engine.blend_plan(one.tokens, one.chunks, 1.0) for one in (ONE, *others)]
    asked = [
        engine.start(last_of(engine.blended(one.tokens, greedy(8), plan)))
        for one, plan in zip((ONE, *others), plans, strict=True)
    ]
    until(lambda: len(engine.reuse.paths["blend"]._queue._queue) == 4, "three wait")
    come.set()

    found = [answer_of(each.result(patience(PATIENCE_S))) for each in asked]

    assert [each.tokens for each in found] == [answer, *wanted]
    assert outcomes(engine, "late") == late + 3
    assert engine.port.fetches == fetches + 1, "nobody else asks the tier that hangs"
    assert outcomes(engine, "failed") == failed
    until(lambda: engine.blocks_in_use() == 0, "blocks come back")
    engine.port.before_fetch, engine.port.spoil = lambda: None, lambda sealed: sealed
    another = ChunkedPrompt([*prompt(702, 37), *ONE.tokens[37:]], ONE.chunks)
    assert ask(engine, another).blended > 0, "and the next one is blended again"


def test_what_the_buffer_does_not_hold_is_computed(
    engine: LiveEngine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = engine.reuse.paths["blend"]._tools
    assert tools is not None
    free = tools.buffer.free_bytes
    per_token = engine.reuse.copier.block_bytes // BLOCK * 4 // 6  # of 6 layers those from the check layer on
    monkeypatch.setattr(tools.buffer, "_free", 200 * per_token)
    ask(engine, ONE)
    assert parts(engine).reused == 128
    assert tools.buffer.free_bytes == 200 * per_token, "what was taken is given back"
    monkeypatch.setattr(tools.buffer, "_free", free)


def test_an_item_that_raises_ends_the_blend_and_not_the_request(
    engine: LiveEngine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = BlendModel.write

    def raising(self: BlendModel, layer: int, *rest: Any) -> None:
        if layer == 4:
            raise RuntimeError("no")
        write(self, layer, *rest)

    monkeypatch.setattr(BlendModel, "write", raising)
    failed = outcomes(engine, "failed")

    found = ask(engine, ONE)

    assert found.tokens == answer
    assert found.usage == {"device": 0, "cpu": 0, "redis": 0, "recomputed": len(ONE.tokens)}
    assert outcomes(engine, "failed") == failed + 1


def test_after_a_prefix_that_does_not_come_vllm_computes(engine: LiveEngine, answer: list[int]) -> None:
    prefix = ChunkedPrompt(ONE.tokens[:140], [])
    ask(engine, prefix, 1.0, plan=engine.blend_plan(prefix.tokens, [], 1.0))
    engine.clear_device()
    plan = engine.blend_plan(ONE.tokens, ONE.chunks, 1.0)
    assert plan.segments
    for load in plan.segments:
        del engine.port.segments[load.key]
    failed = outcomes(engine, "failed")

    found = ask(engine, ONE, plan=plan)

    assert found.tokens == answer
    assert found.usage["recomputed"] == len(ONE.tokens)
    assert outcomes(engine, "failed") == failed + 1


def test_an_abort_gives_the_blocks_back_although_the_tier_hangs(
    engine: LiveEngine, answer: list[int], gate: tuple[threading.Event, threading.Event]
) -> None:
    reached, opened = gate
    cancelled, released = outcomes(engine, "cancelled"), len(engine.port.released)
    plan = engine.blend_plan(ONE.tokens, ONE.chunks)
    request = engine.start(engine.blended(ONE.tokens, greedy(4), plan).__anext__())
    assert reached.wait(patience(PATIENCE_S))
    assert engine.blocks_in_use() > 0

    request.cancel()

    until(lambda: engine.blocks_in_use() == 0, "blocks come back while the fetch hangs")
    assert outcomes(engine, "cancelled") == cancelled + 1
    assert len(engine.port.released) == released, "the segments are still being read: the lease holds them"
    opened.set()
    until(lambda: len(engine.port.released) == released + 1, "the lease is given back")


def test_an_abort_between_two_slices_ends_the_blend(
    engine: LiveEngine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "SLICE_S", 0.0)  # every item is a slice
    compute, reached = BlendModel.compute, threading.Event()
    requests: list[Any] = []

    def slow(self: BlendModel, layer: int, *rest: Any) -> Any:
        if layer == 1:
            reached.set()
            until(lambda: requests and requests[0].cancelled(), "the client leaves")
        return compute(self, layer, *rest)

    monkeypatch.setattr(BlendModel, "compute", slow)
    cancelled = outcomes(engine, "cancelled")
    plan = engine.blend_plan(ONE.tokens, ONE.chunks)
    request = engine.start(engine.blended(ONE.tokens, greedy(4), plan).__anext__())
    assert reached.wait(patience(PATIENCE_S))
    request.cancel()
    requests.append(request)
    until(lambda: outcomes(engine, "cancelled") == cancelled + 1, "the blend ends")
    until(lambda: engine.blocks_in_use() == 0, "blocks come back")


def test_beyond_those_that_may_wait_prompts_are_computed(
    engine: LiveEngine,
    answer: list[int],
    gate: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, opened = gate
    monkeypatch.setattr(engine.reuse.paths["blend"]._queue, "_max_waiting", 1)
    others = [chunked(50 + number, 20, [160], 40) for number in range(2)]
    engine.port.before_fetch = lambda: None
    wanted = [engine.ask(one.tokens)[0] for one in others]
    for one in others:
        store(engine, one)
    engine.port.before_fetch = gate_of(reached, opened)
    busy = outcomes(engine, "refused_busy")

    def begin(one: ChunkedPrompt) -> Any:
        plan = engine.blend_plan(one.tokens, one.chunks, 1.0)
        return engine.start(last_of(engine.blended(one.tokens, greedy(8), plan)))

    head = begin(ONE)
    assert reached.wait(patience(PATIENCE_S))
    waiting = begin(others[0])
    until(lambda: len(engine.reuse.paths["blend"]._queue._queue) == 2, "one waits")
    computed = answer_of(begin(others[1]).result(patience(PATIENCE_S)))
    assert computed.tokens == wanted[1]
    assert outcomes(engine, "refused_busy") == busy + 1
    assert not head.done()
    opened.set()
    assert answer_of(head.result(patience(PATIENCE_S))).tokens == answer
    assert answer_of(waiting.result(patience(PATIENCE_S))).tokens == wanted[0]


def test_blends_that_wait_leave_half_of_the_device_to_others(
    engine: LiveEngine, answer: list[int], gate: tuple[threading.Event, threading.Event]
) -> None:
    reached, opened = gate
    others = [ChunkedPrompt([*prompt(700 + number, 37), *ONE.tokens[37:]], ONE.chunks) for number in range(5)]
    plans = [engine.blend_plan(one.tokens, one.chunks, 1.0) for one in (ONE, *others)]

    asked = [
        engine.start(last_of(engine.blended(one.tokens, greedy(2), plan)))
        for one, plan in zip((ONE, *others), plans, strict=True)
    ]
    assert reached.wait(patience(PATIENCE_S))
    neighbour = engine.start(engine.answer(prompt(950, 200), greedy(2), planned=False))

    assert neighbour.result(patience(PATIENCE_S / 3)), "the tier hangs, and with it all blends"
    assert len(engine.reuse.paths["blend"]._queue._queue) == 2, "of 17 blocks each, and the pool has 100"
    opened.set()
    assert all(request.result(patience(PATIENCE_S)) for request in asked)


def test_a_prompt_whose_hidden_states_do_not_fit_the_buffer_is_computed(
    engine: LiveEngine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = engine.reuse.paths["blend"]._tools
    assert tools is not None
    monkeypatch.setattr(engine.reuse.paths["blend"], "_buffer_bytes", 543 * tools.model.row_bytes)
    refused = outcomes(engine, "refused_large")
    assert ask(engine, ONE).tokens == answer
    assert outcomes(engine, "refused_large") == refused + 1
    monkeypatch.setattr(engine.reuse.paths["blend"], "_buffer_bytes", 544 * tools.model.row_bytes)
    assert ask(engine, ChunkedPrompt([*prompt(701, 37), *ONE.tokens[37:]], ONE.chunks)).blended > 0


def gate_of(reached: threading.Event, opened: threading.Event) -> Callable[[], None]:
    def stall() -> None:
        reached.set()
        assert opened.wait(patience(PATIENCE_S))

    return stall


def test_one_that_waits_in_the_queue_ends_at_once_when_it_is_aborted(
    engine: LiveEngine, answer: list[int], gate: tuple[threading.Event, threading.Event]
) -> None:
    reached, opened = gate
    other = chunked(60, 20, [160], 40)
    plans = [engine.blend_plan(one.tokens, ONE.chunks, 1.0) for one in (ONE, other)]
    blend = plans[0].extras[BLEND]
    moved = replace(blend, chunks=(blend.chunks[0]._replace(start_token=20),))
    plans[1] = replace(plans[1], extras={BLEND: moved})
    head = engine.start(last_of(engine.blended(ONE.tokens, greedy(8), plans[0])))
    assert reached.wait(patience(PATIENCE_S))
    held = engine.blocks_in_use()
    request = engine.start(engine.blended(other.tokens, greedy(8), plans[1]).__anext__())
    until(lambda: len(engine.reuse.paths["blend"]._queue._queue) == 2, "one waits")
    request.cancel()
    until(lambda: engine.blocks_in_use() == held, "its blocks come back")
    opened.set()
    assert answer_of(head.result(patience(PATIENCE_S))).tokens == answer


def test_a_blended_request_that_is_preempted_is_computed_and_not_blended_again(
    engine: LiveEngine, answer: list[int]
) -> None:
    done = outcomes(engine, "done")
    pool = engine.scheduler.kv_cache_manager.block_pool
    neighbours = [prompt(900 + number, 60) for number in range(4)]
    alone = [engine.ask(tokens, max_tokens=100)[0] for tokens in neighbours]
    engine.clear_device()
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def note(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *rest, **options)

    taken = engine.on_engine_thread(lambda: pool.get_new_blocks(99 - 18 - 4 * 3))
    engine.scheduler._preempt_request = note
    try:
        others = [engine.start(engine.answer(tokens, greedy(100), planned=False)) for tokens in neighbours]
        plan = engine.blend_plan(ONE.tokens, ONE.chunks, 1.0)
        found = engine.start(last_of(engine.blended(ONE.tokens, greedy(100), plan))).result(patience(PATIENCE_S))
        answers = [list(other.result(patience(PATIENCE_S)).outputs[0].token_ids) for other in others]
    finally:
        engine.scheduler._preempt_request = preempt
        engine.on_engine_thread(lambda: pool.free_blocks(taken))
    engine.settle()
    assert preempted
    assert answers == alone
    assert list(found.outputs[0].token_ids)[:8] == answer
    assert outcomes(engine, "done") <= done + 1


@pytest.mark.parametrize(("gain_s", "blended"), [(60.0, 4), (0.0, 2)], ids=["worth it", "not worth it"])
def test_a_blend_waits_for_room_no_longer_than_it_is_sooner_than_computing(
    engine: LiveEngine,
    answer: list[int],
    gate: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    gain_s: float,
    blended: int,
) -> None:
    reached, opened = gate
    monkeypatch.setattr(engine.reuse.paths["blend"]._queue, "_max_blocks", 40)  # two of 17
    others = [ChunkedPrompt([*prompt(800 + number, 37), *ONE.tokens[37:]], ONE.chunks) for number in range(3)]
    done, busy = outcomes(engine, "done"), outcomes(engine, "refused_busy")

    def begin(one: ChunkedPrompt) -> Any:
        expected = PlanExpectation(load_s=1.0, recompute_s=1.0 + gain_s)
        plan = replace(engine.blend_plan(one.tokens, one.chunks), expected=expected)
        return engine.start(last_of(engine.blended(one.tokens, greedy(2), plan)))

    asked = [begin(ONE), *map(begin, others)]
    assert reached.wait(patience(PATIENCE_S))
    if blended < len(asked):
        until(lambda: sum(request.done() for request in asked) == len(asked) - blended, "the others are computed")
    opened.set()
    assert all(request.result(patience(PATIENCE_S)) for request in asked)
    assert (outcomes(engine, "done") - done, outcomes(engine, "refused_busy") - busy) == (blended, 4 - blended)
