"""A step's expected time bounds every step of an engine whose time grows with its work, however little is measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmanager.scheduling.step_time import FORGET, Step, StepEstimate
from tests.quantities import up_to

constants = up_to(10.0)
works = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 200_000)), min_size=1, max_size=4).map(
    lambda requests: _step(requests)
)


def _step(requests: list[tuple[int, int]]) -> Step:
    work = Step()
    for tokens, context in requests:
        work = work.plus(tokens, context)
    return work


def test_the_work_of_a_step_counts_every_token_that_is_attended_to() -> None:
    pairs = sum(position + 1 for position in range(100, 103)) + sum(position + 1 for position in range(7, 8))
    step = _step([(3, 100), (1, 7)])
    assert (step.tokens, step.attended) == (4, pairs)


@given(st.lists(works, min_size=1, max_size=6), works, constants, constants, constants)
def test_no_step_takes_longer_than_expected_where_time_grows_with_work(
    measured: list[Step], asked: Step, a: float, b: float, c: float
) -> None:
    def seconds(work: Step) -> float:
        return 1e-3 * (a + b * work.tokens) + 1e-9 * c * work.attended

    estimate = StepEstimate()
    for work in measured:
        estimate.took(work, seconds(work))
    expected = estimate.expected_s(asked)
    # What is kept of several like steps has been forgotten a little.
    assert expected is not None
    assert seconds(asked) <= expected * (1 + 1e-9) / FORGET ** len(measured)


def test_nothing_is_expected_before_a_token_was_computed() -> None:
    estimate = StepEstimate()
    estimate.took(Step(), 5.0)
    assert estimate.expected_s(Step().plus(1, 0)) is None


def test_one_slow_step_is_forgotten_after_many_quick_ones() -> None:
    estimate, work = StepEstimate(), Step().plus(1, 10)
    estimate.took(work, 60.0)
    estimate.took(work, 0.01)
    assert estimate.expected_s(work) == FORGET * 60.0
    for _ in range(3000):
        estimate.took(work, 0.01)
    assert estimate.expected_s(work) == 0.01


def test_what_is_kept_does_not_grow_with_the_number_of_steps() -> None:
    estimate = StepEstimate()
    for number in range(20_000):
        estimate.took(Step().plus(1 + number % 2048, number), 0.01)
    assert len(estimate._slowest) < 200
