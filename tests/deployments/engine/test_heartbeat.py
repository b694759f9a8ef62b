"""A hang is found, and nothing that is merely slow is taken for one; an engine that hangs ends its requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from live_engine import PATIENCE_S, LiveEngine
from torch._dynamo.callback import CallbackTrigger, callback_handler
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.heartbeat import HANG_FACTOR, LOOK_EVERY_S, UNKNOWN_S, HangWatch, Heartbeat
from deployments.engine.host import EngineHungError
from kvmanager.scheduling.step_time import Step
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.patience import patience, until

SLACK_S = 10.0
FULL_STEP = Step().plus(512, 0)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def learn(heart: Heartbeat, clock: Clock, work: Step, seconds: float) -> None:
    with heart.turn():
        heart.scheduled(work)
        clock.now += seconds


def found_after(heart: Heartbeat, clock: Clock) -> float | None:
    """When a turn that does not end is called a hang; None: not in an hour."""
    watch = HangWatch(heart.beat, SLACK_S, lambda why: None)
    began = clock.now
    while clock.now < began + 3600:
        if watch.look(clock.now) is not None:
            return clock.now - began
        clock.now += LOOK_EVERY_S
    return None


def test_a_step_may_take_several_times_the_slowest_of_its_size_and_is_then_a_hang(clock: Clock) -> None:
    heart = Heartbeat(clock)
    learn(heart, clock, FULL_STEP, 6.0)
    with heart.turn():
        heart.scheduled(FULL_STEP)
        found = found_after(heart, clock)
    assert found is not None
    assert HANG_FACTOR * 6.0 + SLACK_S < found <= HANG_FACTOR * 6.0 + SLACK_S + 3 * LOOK_EVERY_S


def test_a_long_step_after_many_short_ones_has_its_own_time(clock: Clock) -> None:
    heart = Heartbeat(clock)
    for _ in range(100):
        learn(heart, clock, Step().plus(1, 100), 0.05)
    with heart.turn():
        heart.scheduled(FULL_STEP)
        found = found_after(heart, clock)
    assert found is not None
    assert found > 512 * 0.05


@pytest.mark.parametrize("context", [2048, 128_000])
def test_a_step_after_a_long_context_may_take_as_much_longer_as_it_attends_to(clock: Clock, context: int) -> None:
    heart = Heartbeat(clock)
    learn(heart, clock, FULL_STEP, 1.0)
    work = Step().plus(512, context)
    with heart.turn():
        heart.scheduled(work)
        found = found_after(heart, clock)
    assert found is not None
    assert found > min(UNKNOWN_S, HANG_FACTOR * work.attended / FULL_STEP.attended) + SLACK_S
    assert found < UNKNOWN_S + SLACK_S + 1.0


def test_a_call_that_does_not_return_is_found_after_the_slack(clock: Clock) -> None:
    heart = Heartbeat(clock)
    with heart.turn():
        found = found_after(heart, clock)
    assert found is not None
    assert SLACK_S < found <= SLACK_S + 3 * LOOK_EVERY_S


def test_a_step_that_waits_for_a_load_has_the_time_of_the_longest(clock: Clock) -> None:
    heart = Heartbeat(clock)
    learn(heart, clock, FULL_STEP, 0.1)
    with heart.turn():
        heart.may_wait(64.0)
        heart.may_wait(8.0)
        heart.scheduled(FULL_STEP)
        waiting = found_after(heart, clock)
    with heart.turn():
        heart.scheduled(FULL_STEP)
        next_step = found_after(heart, clock)
    assert waiting is not None
    assert next_step is not None
    assert 64.0 + SLACK_S < waiting <= 64.0 + SLACK_S + HANG_FACTOR * 0.1 + 3 * LOOK_EVERY_S
    assert next_step < 64.0, "what a step may wait for is of that step alone"


def test_the_first_step_of_all_and_one_that_compiles_have_minutes(clock: Clock) -> None:
    heart = Heartbeat(clock)
    with heart.turn():
        heart.scheduled(Step().plus(1, 0))
        first = found_after(heart, clock)
    learn(heart, clock, FULL_STEP, 0.1)
    forget = heart.hear_compilation()
    with heart.turn():
        heart.scheduled(FULL_STEP)
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            compiling = found_after(heart, clock)
    assert first is not None
    assert compiling is not None
    assert first > UNKNOWN_S
    assert compiling > UNKNOWN_S

    with heart.turn():
        heart.scheduled(FULL_STEP)
        after = found_after(heart, clock)
    forget()
    assert after is not None
    assert after < UNKNOWN_S, "a step that compiled is no measure for the next ones"


def test_an_idle_engine_never_hangs(clock: Clock) -> None:
    heart = Heartbeat(clock)
    learn(heart, clock, FULL_STEP, 0.1)
    assert found_after(heart, clock) is None


def test_turns_that_follow_each_other_are_not_one_long_turn(clock: Clock) -> None:
    heart = Heartbeat(clock)
    watch = HangWatch(heart.beat, SLACK_S, lambda why: None)
    for _ in range(1000):
        with heart.turn():
            clock.now += 1.0
            assert watch.look(clock.now) is None


def test_a_process_that_stood_still_in_a_step_is_not_found_hung_when_it_goes_on(clock: Clock) -> None:
    heart = Heartbeat(clock)
    learn(heart, clock, FULL_STEP, 0.1)
    watch = HangWatch(heart.beat, SLACK_S, lambda why: None)
    with heart.turn():
        heart.scheduled(FULL_STEP)
        assert watch.look(clock.now) is None
        clock.now += 3600.0
        assert watch.look(clock.now) is None


@pytest.fixture
def stuck(mortal_engine: LiveEngine) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: the engine is stuck in a step, which begins with the next request; and it may come back."""
    engine = mortal_engine
    core = engine.thread.core
    entered, gate, step = threading.Event(), threading.Event(), core.step_fn

    def hang() -> Any:
        outputs = step()
        entered.set()
        gate.wait()
        return outputs

    engine.ask(prompt(700, 40), planned=False)  # so that steps have been measured
    engine.on_engine_thread(lambda: setattr(core, "step_fn", hang))
    yield entered, gate
    gate.set()


def test_an_engine_that_hangs_ends_its_requests_refuses_new_ones_and_stays_dead(
    engine: LiveEngine, stuck: tuple[threading.Event, threading.Event]
) -> None:
    entered, gate = stuck
    found: list[str] = []

    def give_up(why: str) -> None:
        found.append(why)
        engine.thread.give_up(EngineHungError(why))

    watch = HangWatch(engine.thread.beat, 1.0, give_up)
    watch.start()
    waiting = [engine.start(engine.answer(prompt(701 + n, 40), greedy(8), planned=False)) for n in range(2)]
    assert entered.wait(patience(PATIENCE_S))
    call = engine.thread.call(lambda: None)

    for request in waiting:
        with pytest.raises(EngineDeadError):
            request.result(patience(PATIENCE_S))
    with pytest.raises(EngineDeadError):
        call.result(patience(PATIENCE_S))
    assert "has not ended after" in found[0]
    assert engine.llm.errored
    assert isinstance(engine.thread.error, EngineHungError)
    with pytest.raises(EngineDeadError):
        engine.run(engine.answer(prompt(710, 40), greedy(8), planned=False))

    gate.set()  # too late: it stays dead, and its thread ends
    until(lambda: not engine.thread._thread.is_alive(), "the engine thread ends")
    assert isinstance(engine.thread.error, EngineHungError)
