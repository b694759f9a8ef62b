"""A budget holds steps to a target where their time is as the model says, and leaves nobody without a token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.scheduling.step_budget import StepBudget
from kvmanager.scheduling.step_time import Step, StepTime
from tests.quantities import up_to

BLOCK, CEILING = 32, 512


def measured(once: float, decode: float, token: float, pair: float, steps: int = 300) -> StepTime:
    draw, time = random.Random(1), StepTime()
    for number in range(steps):
        step = Step()
        for _ in range(draw.randrange(1, 8)):
            step = step.plus(1, draw.randrange(20, 800))
        if number % 2:
            step = step.plus(draw.randrange(32, 512), draw.randrange(0, 2000))
        time.took(step, once + decode * step.decodes + token * step.prefill + pair * step.attended, number * 0.05)
    return time


def test_steps_are_learned_and_a_unit_is_a_decoded_token_of_the_usual_batch() -> None:
    time = measured(4e-3, 4e-4, 5e-5, 2e-9)
    assert time.decodes_s(4, 400) == pytest.approx(5.6e-3, rel=0.1)
    assert time.prefill_s == pytest.approx(5e-5, rel=0.2)
    assert 4e-4 < time.decode_s < 4.4e-3
    assert time.units(100, 2) == pytest.approx(2 + 100 * time.prefill_s / time.decode_s)


def test_a_unit_does_not_jump_where_steps_are_alike_and_noisy() -> None:
    time, draw = StepTime(), random.Random(7)
    units = []
    for number in range(2_000):
        noise = draw.lognormvariate(0.0, 0.3) * (5.0 if draw.random() < 0.01 else 1.0)
        if number % 50 == 49:
            time.took(Step().plus(100, 0).plus(1, 500).plus(1, 500), (0.006 + 0.009) * noise, number * 0.005)
        else:
            decodes = draw.choice((3, 4, 4, 4))
            step = Step(decodes, 0, 2_000 + number, 2_000 + number)
            time.took(step, (0.004 + 0.0005 * decodes) * noise, number * 0.005)
        if number > 200:
            units.append((time.decode_s, time.prefill_s))
    for found in zip(*units, strict=True):
        assert max(found) < 1.6 * min(found), "keys are made of it, and compared"


@settings(max_examples=25)
@given(
    st.floats(1e-3, 1e-2), st.floats(1e-4, 1e-3), st.floats(2e-5, 1e-3), up_to(1e-8, 1e-12),
    st.integers(1, 8), st.integers(0, 2000), st.floats(0.012, 0.2),
)  # fmt: skip
def test_a_step_keeps_to_the_target_or_computes_one_block(
    once: float, decode: float, token: float, pair: float, decodes: int, context: int, target: float
) -> None:
    time = measured(once, decode, token, pair)
    budget = StepBudget(target, CEILING, BLOCK, time)

    tokens = budget.tokens(decodes, 100 * decodes, context)

    prefill = tokens - decodes
    assert decodes < tokens <= CEILING
    step = Step(decodes, 0, 100 * decodes).plus(prefill, context)
    seconds = once + decode * decodes + token * prefill + pair * step.attended
    if prefill > BLOCK:
        assert seconds <= 1.2 * target
    assert tokens == CEILING or prefill % BLOCK == 0


def test_nobody_decodes_or_nothing_is_known_and_a_step_is_as_long_as_ever() -> None:
    assert StepBudget(0.02, CEILING, BLOCK, StepTime()).tokens(4, 400, 0) == CEILING
    assert StepBudget(0.02, CEILING, BLOCK, measured(4e-3, 4e-4, 5e-5, 0)).tokens(0, 0, 0) == CEILING


def test_whoever_decodes_has_a_token_however_small_the_target() -> None:
    budget = StepBudget(1e-4, CEILING, BLOCK, measured(4e-3, 4e-4, 5e-5, 0))
    assert budget.tokens(20, 2000, 0) == 20 + BLOCK
    assert budget.tokens(CEILING, 2000, 0) == CEILING
    assert budget.reachable is False


def test_slow_steps_and_what_passes_between_them_make_the_next_ones_shorter() -> None:
    time = measured(4e-3, 4e-4, 5e-5, 0)
    budget = StepBudget(0.03, CEILING, BLOCK, time)
    before = budget.tokens(4, 400, 0)
    draw = random.Random(2)
    for _ in range(400):
        budget.took(Step(4, 128, 0), time.seconds(Step(4, 128, 0)) * draw.uniform(0.9, 1.4))
    slower = budget.tokens(4, 400, 0)
    for _ in range(20):
        budget.passed_between(0.01)
    assert budget.margin == pytest.approx(1.39, abs=0.06), "the 98th percentile"
    assert before > slower > budget.tokens(4, 400, 0) > 4
    for _ in range(20):
        budget.passed_between(100.0)
    assert budget.room_s >= 0.03 / 2 / budget.margin - 1e-9, "a slice of something else never takes all of it"


def test_prompts_among_many_decodes_are_held_to_the_target_from_the_first_one() -> None:
    """Nothing but decodes is known when the first comes, and hundreds of steps lie between it and the next one."""
    once, decode, token, pair, target = 5e-3, 5e-4, 8e-5, 4e-9, 0.03
    draw, time = random.Random(3), StepTime()
    budget = StepBudget(target, CEILING, BLOCK, time)
    took: list[float] = []
    now = 0.0
    for _ in range(12):
        for number in range(600):
            step = Step(3, 0, 3 * number, 3 * number)
            time.took(step, (once + 3 * decode + pair * step.attended) * draw.uniform(0.9, 1.1), now)
            now += 7e-3
        left = 1600
        while left:
            chunk = min(left, budget.tokens(3, 1800, 1600 - left) - 3)
            step = Step(3, 0, 1800, 1800).plus(chunk, 1600 - left)
            seconds = once + 3 * decode + token * chunk + pair * step.attended
            took.append(seconds * draw.uniform(0.9, 1.1))
            budget.took(step, took[-1])
            time.took(step, took[-1], now)
            now, left = now + took[-1], left - chunk
    assert max(took) < 1.25 * target
    assert len(took) < 12 * 10, "and no shorter than the target asks for"


def test_a_prefill_longer_than_any_that_was_measured_is_approached_step_by_step() -> None:
    time = StepTime()
    for number in range(20):
        time.took(Step(2, 0, 100, 100), 5e-3, float(number))
    time.took(Step(2, BLOCK, 100, 100), 5e-3, 21.0)  # free, it seems
    assert StepBudget(0.05, CEILING, BLOCK, time).tokens(2, 100, 0) == 2 + 2 * BLOCK


@pytest.mark.parametrize("bad", [(0.0, 512, 32), (float("nan"), 512, 32), (1.0, 0, 32), (1.0, 512, 0)])
def test_what_cannot_be_is_refused(bad: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="no step can be held"):
        StepBudget(*bad, StepTime())
