"""A growth is seen, and noise is none."""

from __future__ import annotations

from random import Random

import pytest

from load_tests.soak.slopes import slope


def wandering(rng: Random, count: int, drift: float) -> list[float]:
    """Readings of which each resembles the one before, around a line that rises by `drift` a reading."""
    found, off = [], 0.0
    for number in range(count):
        off = 0.8 * off + rng.gauss(0.0, 1.0)
        found.append(1000.0 + drift * number + off)
    return found


def test_what_grows_is_seen_to_grow() -> None:
    readings = wandering(Random(1), 180, drift=0.1)
    found = slope(range(0, 1800, 10), readings)
    assert found.rises_by_more_than(0.0)
    assert found.low < 0.01 < found.high


def test_what_wanders_around_a_height_seldom_seems_to_grow() -> None:
    times = list(range(0, 1800, 10))
    seen = sum(slope(times, wandering(Random(seed), 180, drift=0.0)).rises_by_more_than(0.0) for seed in range(200))
    assert seen <= 12, "some 2.5 % are to be expected"


def test_readings_too_few_for_an_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 20 readings"):
        slope(range(19), [0.0] * 19)
