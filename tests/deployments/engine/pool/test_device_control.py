"""Evictions and offloads by order at a real engine's device pool; promotions: `test_pool_promotions.py`."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine
from ordered_pool import TOKENS, outcome, spans, stored

from deployments.engine import directive_runner as device_orders
from deployments.engine.pool import control
from kvmanager.moves.directives import Offload, Onboard
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience

# evict


def test_evicted_blocks_leave_the_prefix_cache_and_are_reported(engine: LiveEngine) -> None:
    tokens = prompt(730, TOKENS)
    answer, _ = engine.ask(tokens)
    hashes = engine.hashes(tokens)

    done = engine.evict(hashes[6:]).result(patience(PATIENCE_S))

    assert (done.outcome, done.blocks) == ("done", 6)
    assert engine.port.on_device == set(hashes[:6])
    again, by_tier = engine.ask(tokens, planned=False)
    assert (again, by_tier["device"]) == (answer, 6 * BLOCK)
    assert outcome(engine.evict([b"x" * 32])) == "refused_gone"


def test_what_a_request_uses_is_not_evicted(engine: LiveEngine) -> None:
    tokens = prompt(731, TOKENS)

    async def evict_meanwhile() -> Any:
        done = None
        async for _ in engine.stream(tokens, greedy(200)):
            done = done or await asyncio.wrap_future(engine.evict(engine.hashes(tokens)))
        return done

    assert engine.run(evict_meanwhile()).outcome == "refused_gone"
    assert set(engine.hashes(tokens)) <= set(engine.on_engine_thread(engine.reuse.control.cached_hashes))


# clear


@pytest.mark.parametrize("own", [True, False])
def test_a_clear_is_done_in_slices_between_which_others_call_the_engine(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    monkeypatch.setattr(control, "MOST_BLOCKS", 2)
    monkeypatch.setattr(control, "MOST_LOOKED_AT", 5)
    begun: list[str] = []
    clear = engine.reuse.control.clear

    def one_slice(*args: Any) -> tuple[int, int]:
        begun.append("clear")
        if len(begun) == 1:  # on the engine thread, and so before the next slice is called for
            engine.thread.call(lambda: begun.append("another"))
        return clear(*args)

    monkeypatch.setattr(engine.reuse.control, "clear", one_slice)
    tokens = prompt(735, TOKENS)
    with engine.acting_for("alice"):
        engine.ask(tokens)
        assert engine.clear_device(engine.tenant if own else None) == 12
        assert not set(engine.hashes(tokens)) & set(engine.on_engine_thread(engine.reuse.control.cached_hashes))
    assert begun[:2] == ["clear", "another"]
    assert begun.count("clear") >= 20


def test_a_clear_of_an_engine_that_fails_ends_with_its_error(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tenant: str | None, first: int) -> tuple[int, int]:
        if first:
            raise ValueError("the pool is broken")
        return 0, 1

    monkeypatch.setattr(engine.reuse.control, "clear", fails)
    with pytest.raises(ValueError, match="broken"):
        engine.clear_device()


# offload


def test_what_no_tier_has_is_offloaded_from_the_device_bit_for_bit(engine: LiveEngine) -> None:
    tokens = prompt(737, TOKENS)
    answer, _ = engine.ask(tokens)
    wanted = spans(engine)
    original = engine.port.segments
    engine.port = MemoryPort()  # the tier was lost

    done = engine.direct(Offload(tuple(wanted))).result(patience(PATIENCE_S))

    assert (done.outcome, done.segments, done.blocks) == ("done", 3, 12)
    assert engine.port.segments == original
    engine.settle()
    assert engine.blocks_in_use() == 0
    engine.clear_device()
    assert engine.ask(tokens) == (answer, {"device": 0, "cpu": 384, "redis": 0, "recomputed": 16})


def test_what_is_offloaded_counts_for_its_tenant_though_the_manager_does_not_know_whose_it_is(
    engine: LiveEngine,
) -> None:
    with engine.acting_for("alice"):
        engine.ask(prompt(738, TOKENS))
        wanted = [replace(span, tenant="") for span in spans(engine)]  # as after the manager's restart
        engine.port = MemoryPort()
        assert outcome(engine.direct(Offload(tuple(wanted)))) == "done"
        assert {span.tenant for span in spans(engine)} == {engine.tenant}


def test_an_offload_of_what_has_left_the_device_is_refused(engine: LiveEngine) -> None:
    engine.ask(prompt(738, TOKENS))
    wanted = spans(engine)
    assert outcome(engine.evict([wanted[0].key])) == "done"
    assert outcome(engine.direct(Offload(tuple(wanted[:1])))) == "refused_gone"
    assert outcome(engine.direct(Offload(tuple(wanted[1:])))) == "refused_gone", "it follows on what is not here"


def test_a_segment_that_does_not_follow_its_parent_is_not_offloaded(engine: LiveEngine) -> None:
    engine.ask(prompt(782, TOKENS))
    whole = spans(engine)[1]
    torn = SegmentSpan(whole.key, whole.parent, whole.start_block, whole.num_blocks - 1, whole.kind, whole.marks[8:])
    assert outcome(engine.direct(Offload((torn,)))) == "refused_gone"


def test_an_offload_that_ends_too_late_leaves_the_next_save_alone(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_orders, "GRACE_S", 0.0)
    engine.ask(prompt(783, TOKENS))
    wanted = spans(engine)
    engine.port = MemoryPort()
    opened = threading.Event()
    engine.port.before_offer = opened.wait
    for deadline_s in (0.2, 2.0, 20.0):  # a machine that stands still may take all of it before the offload begins
        assert outcome(engine.direct(Offload(tuple(wanted)), deadline_s)) == "refused_late"
        if engine.blocks_in_use():
            break
    opened.set()
    engine.settle()
    assert set(engine.port.segments) == {span.key for span in wanted}
    engine.ask(prompt(784, TOKENS))
    assert len(engine.port.segments) == 6


def test_an_offload_that_the_manager_does_not_answer_has_failed(engine: LiveEngine) -> None:
    engine.ask(prompt(739, TOKENS))
    wanted = spans(engine)
    engine.port = MemoryPort()
    engine.port.refuse_offers = True
    assert outcome(engine.direct(Offload(tuple(wanted)))) == "failed"
    engine.settle()
    assert engine.blocks_in_use() == 0


def test_an_offload_beyond_what_saves_may_hold_is_refused(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.ask(prompt(780, TOKENS))
    monkeypatch.setattr(engine.transfer, "_max_held_blocks", 3)
    assert outcome(engine.direct(Offload(tuple(spans(engine))))) == "refused_full"


# all of them


def test_outcomes_are_counted_and_the_time_taken_from_the_engine_is_known(engine: LiveEngine) -> None:
    tokens, _ = stored(engine, 781)
    before = dict(engine.orders.counters)
    for deadline_s in (PATIENCE_S, 0.0):
        engine.onboard(tokens, deadline_s).result(patience(PATIENCE_S))
    for counted in (("promote", "done"), ("promote", "refused_late")):
        assert engine.orders.counters[counted] == before.get(counted, 0) + 1
    assert 0 < engine.orders.times.worst["promote"] < PATIENCE_S
    assert engine.orders.times.registry.get_sample_value("crosskv_directive_step_seconds_count", {"kind": "promote"})


def test_directives_beside_requests_leave_every_block_accounted_for(engine: LiveEngine) -> None:
    """Streams, aborts and all kinds of directives at once; the engine's fixture counts the blocks afterwards."""
    prompts = [stored(engine, 800 + number)[0] for number in range(3)]
    answers = [engine.ask(tokens, planned=False)[0] for tokens in prompts]

    async def streams(number: int) -> None:
        for turn in range(4):
            tokens = prompts[(number + turn) % 3]
            stream = engine.stream(tokens, greedy(30))
            async for output in stream:
                if turn % 2 and len(output.outputs[0].token_ids) > 5:
                    break  # the client went away
            await stream.aclose()

    async def orders() -> None:
        for turn in range(6):
            hashes = engine.hashes(prompts[turn % 3])
            plan = engine.port.plan(hashes, used=False)
            wanted = [span for span in spans(engine) if span.key in hashes]
            ordered = (
                engine.evict(hashes[4:]),
                engine.direct(Onboard(tuple(hashes), plan), 5.0),
                engine.direct(Offload(tuple(wanted)), 5.0),
            )
            await asyncio.gather(*map(asyncio.wrap_future, ordered))

    async def everything() -> None:
        await asyncio.gather(streams(0), streams(1), orders())

    engine.run(everything())
    engine.settle()
    assert [engine.ask(tokens)[0] for tokens in prompts] == answers
    assert engine.blocks_in_use() == 0
