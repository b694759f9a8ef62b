"""A growth is seen, and noise is none."""

from __future__ import annotations

from random import Random

import pytest

from load_tests.soak.__main__ import slope


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


def between_trims(rng: Random, count: int, drift: float) -> list[float]:
    """Readings every 5 s of a heap that is trimmed each minute; how much is freed in a minute grows with the load."""
    found, load = [], 1.0
    for number in range(count):
        if number % 12 == 0:
            load += rng.uniform(0.0, 0.1)
        found.append(900.0 + drift * number + load * rng.uniform(0.9, 1.1) * (number % 12))
    return found


def test_what_is_freed_until_the_next_trim_is_no_growth() -> None:
    times = list(range(0, 1800, 5))
    seen = [slope(times, between_trims(Random(seed), 360, 0.0)).rises_by_more_than(0.0) for seed in range(100)]
    assert not any(seen)
    leaks = [slope(times, between_trims(Random(seed), 360, 0.02)).rises_by_more_than(0.002) for seed in range(100)]
    assert all(leaks)


def test_readings_too_few_for_an_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 20 readings"):
        slope(range(19), [0.0] * 19)
