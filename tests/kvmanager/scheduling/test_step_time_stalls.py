"""One step that stalls teaches nothing; a machine that stays slower is followed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmanager.scheduling.step_time import Step, StepTime

DECODES = Step().plus(1, 300).plus(1, 300).plus(1, 300).plus(1, 300)
MIXED = DECODES.plus(128, 0)
PREFILL = Step().plus(128, 0)
STEPS = {"decodes": DECODES, "mixed": MIXED, "prefill": PREFILL}
LONGEST_STALL = 1e7
WARM_STEPS = 400


def seconds(step: Step) -> float:
    return (0.004 + 0.0004 * step.decodes if step.decodes else 0.0) + (0.002 + 5e-5 * step.prefill) * bool(step.prefill)


def running() -> tuple[StepTime, Callable[..., None]]:
    """Of an engine that has run for a while, and what lets it compute a step so many times slower."""
    time, clock = StepTime(), count()

    def compute(step: Step, slower: float = 1.0) -> None:
        time.took(step, slower * seconds(step), 0.01 * next(clock))

    for number in range(WARM_STEPS):
        compute((DECODES, MIXED, DECODES, PREFILL)[number % 4])
    return time, compute


@settings(max_examples=60)
@given(st.sampled_from(sorted(STEPS)), st.floats(1.0, LONGEST_STALL), st.sampled_from(sorted(STEPS)), st.integers(0, 8))
@example("decodes", 1000.0, "mixed", 0)
@example("prefill", LONGEST_STALL, "prefill", 3)
@example("mixed", 2.49, "prefill", 0)
def test_one_stall_of_any_length_moves_no_unit_by_more_than_a_twelfth(
    stalled: str, slower: float, follows: str, before: int
) -> None:
    """Nor does it by what it does to steps that follow, whose prefill is what their decodes do not explain."""
    time, compute = running()
    for _ in range(before):  # which decode step is fitted depends on it
        compute(DECODES)
    units = time.decode_s, time.prefill_s
    compute(STEPS[stalled], slower)
    for _ in range(30):
        assert (time.decode_s, time.prefill_s) == pytest.approx(units, rel=1 / 12)
        compute(STEPS[follows])


@settings(max_examples=20)
@given(st.floats(1.2, 50.0))
@example(2.4)
@example(2.6)
def test_a_machine_that_stays_slower_is_followed(slower: float) -> None:
    time, compute = running()
    decode_s, prefill_s = time.decode_s, time.prefill_s
    for _ in range(150):
        compute(PREFILL, slower)
    assert time.prefill_s > 0.9 * slower * prefill_s
    for _ in range(100):
        compute(DECODES, slower)
    assert time.seconds(DECODES) == pytest.approx(slower * seconds(DECODES), rel=0.25)
    for _ in range(2_300):
        compute(DECODES, slower)
    assert time.decode_s > 0.9 * slower * decode_s


def test_a_new_kind_of_slow_step_is_learned_when_it_comes_again() -> None:
    """A long prefill among short ones is no accident, though each one comes alone."""
    time, compute = running()
    long = Step().plus(128, 4_000)
    before = time.prefill_s
    for _ in range(60):
        compute(long, 3.0)
        compute(PREFILL)
    assert time.seconds(long) == pytest.approx(3.0 * seconds(long), rel=0.1)
    assert time.prefill_s > 1.5 * before, "units count what each of them takes"
