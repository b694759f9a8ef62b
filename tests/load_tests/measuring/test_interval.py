"""How sure a ratio is, without a clock: rounds are made up."""

from __future__ import annotations

import random

import pytest

from load_tests.measuring.interval import FEWEST, paired_interval, ratio_of_means


def rounds(ratio: float, scatter: float, count: int, seed: int = 1) -> tuple[list[float], list[float]]:
    """A machine that drifts by a factor of four, and two arms that differ by `ratio`, more or less."""
    rng = random.Random(seed)
    theirs = [10.0 * 4 ** rng.random() for _ in range(count)]
    return [one * ratio * rng.lognormvariate(0, scatter) for one in theirs], theirs


def test_a_drift_that_both_arms_share_does_not_widen_the_interval() -> None:
    mine, theirs = rounds(0.9, 0.0, 12)
    found = paired_interval(mine, theirs)
    assert (found.low, found.high) == pytest.approx((0.9, 0.9))
    assert found.is_shown
    assert str(found) == "0.900 to 0.900"


def test_a_difference_smaller_than_the_scatter_is_not_shown() -> None:
    found = paired_interval(*rounds(1.02, 0.3, 20))
    assert found.low < 1 < found.high
    assert not found.is_shown
    assert str(found).endswith(", not shown")


def test_more_rounds_narrow_it() -> None:
    few, many = (paired_interval(*rounds(1.5, 0.3, count)) for count in (8, 200))
    assert many.high - many.low < few.high - few.low
    assert many.low < 1.5 < many.high


def test_too_few_rounds_show_nothing_however_far_from_one() -> None:
    assert not paired_interval(*rounds(5.0, 0.0, FEWEST - 1)).is_shown
    assert paired_interval(*rounds(5.0, 0.0, FEWEST)).is_shown


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    held = 0
    for seed in range(60):
        found = paired_interval(*rounds(1.2, 0.2, 30, seed))
        held += found.low <= 1.2 <= found.high
    assert held >= 51  # of 60; 57 are expected, and the percentile method is a little narrow


def test_of_requests_a_long_one_weighs_more_than_a_short_one() -> None:
    assert ratio_of_means([(1.0, 2.0), (100.0, 100.0)]) == pytest.approx(101 / 102)


def test_equal_rounds_give_equal_intervals_and_none_give_none() -> None:
    values = rounds(1.1, 0.2, 10)
    assert paired_interval(*values) == paired_interval(*values)
    with pytest.raises(ValueError, match="no rounds"):
        paired_interval([], [])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_interval([1.0, 2.0], [1.0])
