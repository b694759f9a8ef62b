"""Promotions at a real engine's device pool: what they bring is exact, what they refuse changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_engine import BLOCK, DEVICE_BLOCKS, PATIENCE_S, SEGMENT_BLOCKS, LiveEngine
from ordered_pool import TOKENS, outcome, spans, stored

from deployments.engine import directive_runner as device_orders
from deployments.engine.pool import control as device_control
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until


@pytest.fixture
def gate(engine: LiveEngine) -> Iterator[threading.Event]:
    """Fetches wait for it."""
    opened = threading.Event()
    engine.port.before_fetch = opened.wait
    yield opened
    opened.set()


def test_a_promoted_prompt_is_on_the_device_and_answered_as_if_computed(engine: LiveEngine) -> None:
    tokens, computed = stored(engine, 700)

    done = engine.onboard(tokens).result(patience(PATIENCE_S))

    assert (done.outcome, done.segments, done.blocks) == ("done", 3, 12)
    assert (
        set(engine.hashes(tokens))
        == engine.port.on_device
        == set(engine.on_engine_thread(engine.reuse.control.cached_hashes))
    )
    assert engine.blocks_in_use() == 0
    answer, by_tier = engine.ask(tokens, planned=False)
    assert by_tier == {"device": 12 * BLOCK, "cpu": 0, "redis": 0, "recomputed": 16}
    assert answer == computed
    engine.clear_device()
    engine.port = MemoryPort()
    assert engine.ask(tokens)[0] == answer


def test_a_promotion_is_done_when_its_blocks_are_free_and_reported(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _ = stored(engine, 712)
    publish = engine.reuse.control._publish

    def slow_publish() -> None:
        time.sleep(0.1)
        publish()

    monkeypatch.setattr(engine.reuse.control, "_publish", slow_publish)
    engine.onboard(tokens).result(patience(PATIENCE_S))
    assert set(engine.hashes(tokens)) == engine.port.on_device


def test_what_is_promoted_can_be_saved_again_as_the_bytes_that_came(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 701)
    original = {key: sealed for key, (_, sealed) in engine.port.segments.items()}
    engine.onboard(tokens).result(patience(PATIENCE_S))
    engine.port = MemoryPort()
    engine.ask(tokens)
    assert {key: sealed for key, (_, sealed) in engine.port.segments.items() if key in original} == original


def test_only_what_the_device_lacks_is_promoted(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 702)
    engine.ask(tokens[: 5 * BLOCK + 1])  # five blocks are here again: the second segment begins on the device
    assert engine.onboard(tokens).result(patience(PATIENCE_S)).blocks == 7
    assert engine.ask(tokens, planned=False)[1]["device"] == 12 * BLOCK
    fetches = engine.port.fetches

    again = engine.onboard(tokens).result(patience(PATIENCE_S))

    assert (again.outcome, again.blocks, engine.port.fetches) == ("done", 0, fetches)


def test_a_segment_that_is_not_what_was_stored_never_enters_the_prefix_cache(engine: LiveEngine) -> None:
    tokens, computed = stored(engine, 703)
    second = spans(engine)[1].key

    def spoil(sealed: bytes) -> bytes:
        return sealed[:-1] + bytes([sealed[-1] ^ 1]) if sealed == engine.port.segments[second][1] else sealed

    engine.port.spoil = spoil

    done = engine.onboard(tokens).result(patience(PATIENCE_S))

    assert (done.outcome, done.blocks) == ("failed", SEGMENT_BLOCKS)
    assert engine.port.bad == ["checksum"]
    assert set(engine.on_engine_thread(engine.reuse.control.cached_hashes)) == set(
        engine.hashes(tokens)[:SEGMENT_BLOCKS]
    )
    assert engine.blocks_in_use() == 0
    engine.port.spoil = lambda sealed: sealed
    answer, by_tier = engine.ask(tokens, planned=False)
    assert by_tier["device"] == SEGMENT_BLOCKS * BLOCK
    assert answer == computed


def test_a_tier_that_has_nothing_leaves_the_device_as_it_was(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 704)
    engine.port.spoil = lambda sealed: None
    assert outcome(engine.onboard(tokens)) == "failed"
    assert engine.on_engine_thread(engine.reuse.control.cached_hashes) == []


def test_a_promotion_whose_time_is_over_does_not_begin(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 705)
    assert outcome(engine.onboard(tokens, deadline_s=0.0)) == "refused_late"
    assert engine.port.fetches == 0


def test_what_arrives_after_the_deadline_still_gives_its_blocks_back(
    engine: LiveEngine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_orders, "GRACE_S", 0.0)
    gate.set()
    tokens, _ = stored(engine, 706)
    gate.clear()

    for deadline_s in (0.3, 3.0, 30.0):  # a machine that stands still may take all of it before the promotion begins
        assert outcome(engine.onboard(tokens, deadline_s=deadline_s)) == "refused_late"
        if engine.blocks_in_use():
            break
    assert engine.blocks_in_use() == 12
    assert engine.port.last_deadline <= time.monotonic(), "the tier was told when to give up"
    gate.set()

    until(lambda: engine.blocks_in_use() == 0, "the blocks are free again")


def test_nothing_hotter_is_evicted_for_a_promotion(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 707)
    hot = [prompt(720 + number, 11 * BLOCK + 8) for number in range(3)]
    for _ in range(2):
        for other in hot:  # 33 blocks, each used twice
            engine.ask(other, max_tokens=1)
    pool = engine.reuse.control._pool
    held = engine.on_engine_thread(lambda: pool.get_new_blocks(DEVICE_BLOCKS - 1 - 33))
    try:
        before = set(engine.on_engine_thread(engine.reuse.control.cached_hashes))
        assert before == {name for other in hot for name in engine.hashes(other)}

        assert outcome(engine.onboard(tokens)) == "refused_full"

        assert set(engine.on_engine_thread(engine.reuse.control.cached_hashes)) == before
    finally:
        engine.on_engine_thread(lambda: pool.free_blocks(held))


def test_something_colder_makes_room_for_a_promotion(engine: LiveEngine) -> None:
    tokens, computed = stored(engine, 708)
    for number in range(9):
        engine.ask(prompt(740 + number, 11 * BLOCK), max_tokens=1)
    assert engine.onboard(tokens).result(patience(PATIENCE_S)).blocks == 12
    assert engine.ask(tokens, planned=False) == (computed, {"device": 384, "cpu": 0, "redis": 0, "recomputed": 16})


def test_a_promotion_leaves_running_requests_room_to_grow(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 709)
    pool = engine.reuse.control._pool
    held = engine.on_engine_thread(lambda: pool.get_new_blocks(DEVICE_BLOCKS - 1 - 15))
    try:
        assert outcome(engine.onboard(tokens)) == "refused_full"
        assert pool.get_num_free_blocks() == 15
    finally:
        engine.on_engine_thread(lambda: pool.free_blocks(held))


def test_what_a_request_computes_meanwhile_is_not_there_twice(engine: LiveEngine, gate: threading.Event) -> None:
    gate.set()
    tokens, computed = stored(engine, 710)
    gate.clear()
    promoting = engine.onboard(tokens)
    until(lambda: engine.blocks_in_use() == 12, "the promotion waits for the tier")

    assert engine.ask(tokens, planned=False)[0] == computed
    gate.set()

    assert outcome(promoting) == "done"
    assert engine.on_engine_thread(engine.reuse.control.usage)["cached_blocks"] == 12
    assert engine.blocks_in_use() == 0
    assert engine.ask(tokens, planned=False)[0] == computed


def test_clearing_the_device_ends_a_promotion_under_way(engine: LiveEngine, gate: threading.Event) -> None:
    gate.set()
    tokens, _ = stored(engine, 711)
    gate.clear()
    promoting = engine.onboard(tokens)
    until(lambda: engine.blocks_in_use() == 12, "the promotion waits for the tier")
    engine.clear_device()
    gate.set()

    assert outcome(promoting) == "failed"
    assert engine.on_engine_thread(engine.reuse.control.cached_hashes) == []
    assert engine.port.on_device == set()
    assert engine.blocks_in_use() == 0


def test_a_long_promotion_is_done_in_slices_with_the_engine_stepping_in_between(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, computed = stored(engine, 712)
    monkeypatch.setattr(device_control, "MOST_BLOCKS", SEGMENT_BLOCKS)
    steps, taken = [0], []
    schedule, take = engine.scheduler.schedule, engine.reuse.control._pool.get_new_blocks

    def counted_schedule(*args: Any) -> Any:
        steps[0] += 1
        return schedule(*args)

    def counted_take(number: int) -> Any:
        taken.append((steps[0], number))
        return take(number)

    streaming = engine.start(engine.answer(prompt(790, 40), greedy(1000), planned=False))
    until(lambda: engine.on_engine_thread(engine.scheduler.has_requests), "a request decodes")
    monkeypatch.setattr(engine.scheduler, "schedule", counted_schedule)
    with monkeypatch.context() as patch:
        # Only promotions call it with a whole segment: the stream needs one block at a time.
        patch.setattr(engine.reuse.control._pool, "get_new_blocks", counted_take)
        assert outcome(engine.onboard(tokens)) == "done"
    assert not streaming.done(), "the request outlives the promotion, or the test says nothing"
    streaming.cancel()
    engine.settle()

    slices = [step for step, number in taken if number == SEGMENT_BLOCKS]
    assert len(slices) == 3
    assert slices[0] < slices[1] < slices[2], "the engine has stepped between two slices"
    assert engine.ask(tokens, planned=False) == (computed, {"device": 384, "cpu": 0, "redis": 0, "recomputed": 16})


def test_a_call_from_between_two_steps_waits_for_the_next(engine: LiveEngine) -> None:
    """So a directive of many slices cannot hold up decoding by calling again and again."""
    steps, seen = [0], []
    step = engine.thread.core.step_fn
    over = threading.Event()

    def counted_step() -> Any:
        steps[0] += 1
        return step()

    def again() -> None:
        seen.append(steps[0])
        if len(seen) < 4:
            engine.thread.call(again)
        else:
            over.set()

    engine.thread.core.step_fn = counted_step
    try:
        streaming = engine.start(engine.answer(prompt(792, 40), greedy(1000), planned=False))
        until(lambda: steps[0] > 3, "a request decodes")
        engine.thread.call(again)
        assert over.wait(patience(PATIENCE_S))
        streaming.cancel()
        engine.settle()
    finally:
        engine.thread.core.step_fn = step
    assert len(set(seen)) == 4


def test_a_stale_managers_promotion_is_refused(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 713)
    engine.port.epoch = 2
    engine.ask(prompt(791, 64), max_tokens=1)  # the new manager's first plan
    engine.port.epoch = 1
    assert outcome(engine.onboard(tokens)) == "refused_late"
    engine.reuse.order_device(True).result()


def test_by_recency_a_promotion_takes_the_blocks_of_what_was_used_longest_ago(engine: LiveEngine) -> None:
    tokens, computed = stored(engine, 714)
    engine.reuse.order_device(by_hotness=False).result()
    try:
        others = [prompt(770 + number, TOKENS) for number in range(DEVICE_BLOCKS // 12)]
        for other in others:
            engine.ask(other, max_tokens=1)
        assert outcome(engine.onboard(tokens)) == "done"
        here = set(engine.on_engine_thread(engine.reuse.control.cached_hashes))
        assert set(engine.hashes(tokens)) <= here
        assert all(set(engine.hashes(other)) <= here for other in others[1:])
        assert engine.hashes(others[0])[-1] not in here
        engine.port = MemoryPort()  # from the device or not at all
        answer, by_tier = engine.ask(tokens)
        assert (answer, by_tier["device"]) == (computed, 12 * BLOCK)
    finally:
        engine.reuse.order_device(by_hotness=True).result()
