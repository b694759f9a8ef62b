"""How many workers a load gets, under links of which the test knows the truth."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvmanager.fan_out import HORIZON, LEAST_BYTES_PER_WORKER, TRY_EVERY, TRY_EVERY_AT_MOST, FanOut, assign

MIB = 1 << 20
LARGE = 48 * MIB


def per_connection(workers: int) -> float:
    """A link that gives each connection 100 MB/s."""
    return 100e6 * workers


def contended(workers: int) -> float:
    """A machine on which each further worker costs a tenth."""
    return 600e6 * 0.9 ** (workers - 1)


def capped(workers: int) -> float:
    """Two connections fill it."""
    return min(2, workers) * 300e6


def run(fan_out: FanOut, rate: Callable[[int], float], loads: int, nbytes: int = LARGE, workers: int = 4) -> list[int]:
    """What was chosen in each of so many loads of one size."""
    chosen = []
    for _ in range(loads):
        chosen.append(fan_out.choose(nbytes, 16, workers))
        fan_out.observe(chosen[-1], nbytes, nbytes / rate(chosen[-1]))
    return chosen


def test_before_anything_is_known_a_large_load_uses_all_workers() -> None:
    assert FanOut().choose(LARGE, 16, 4) == 4


def test_a_load_gets_no_worker_without_a_piece_or_without_enough_bytes() -> None:
    assert FanOut().choose(LARGE, 3, 4) == 3
    assert FanOut().choose(2 * LEAST_BYTES_PER_WORKER, 16, 4) == 2
    assert FanOut().choose(LEAST_BYTES_PER_WORKER - 1, 16, 4) == 1
    assert FanOut().choose(0, 0, 4) == 1


def test_all_workers_are_used_where_each_connection_has_its_own_limit() -> None:
    assert run(FanOut(), per_connection, 200)[100:].count(4) >= 95


def test_one_worker_is_used_where_more_only_contend() -> None:
    assert run(FanOut(), contended, 200)[20:].count(1) >= 160


def test_no_more_workers_are_used_than_are_faster() -> None:
    assert run(FanOut(), capped, 200)[20:].count(2) >= 160


def test_three_percent_are_not_worth_another_worker() -> None:
    assert run(FanOut(), lambda workers: 100e6 * (1 + 0.01 * workers), 200)[20:].count(1) >= 160


def test_the_way_to_the_best_is_short() -> None:
    assert run(FanOut(), contended, 12)[-4:].count(1) >= 3


def test_trying_what_is_clearly_worse_becomes_rare() -> None:
    chosen = run(FanOut(), per_connection, 1200)
    assert chosen[600:].count(4) / 600 > 0.99


def test_only_few_loads_are_tries() -> None:
    chosen = run(FanOut(), lambda workers: min(2, workers) * 300e6 - workers * 20e6, 300)
    assert chosen.count(2) > 260
    assert set(chosen) == {1, 2, 4}


def test_a_link_that_becomes_slow_gets_more_workers_again() -> None:
    fan_out = FanOut()
    run(fan_out, contended, 100)
    assert run(fan_out, per_connection, 3 * TRY_EVERY + HORIZON)[-10:].count(4) >= 8


def test_a_link_that_allows_more_is_noticed_from_below() -> None:
    fan_out = FanOut()
    run(fan_out, contended, 100)
    chosen = run(fan_out, lambda workers: contended(1) * workers, 3 * TRY_EVERY_AT_MOST)
    assert chosen[-20:].count(4) >= 18


def test_one_try_is_enough_where_the_last_is_long_past() -> None:
    fan_out = FanOut()
    run(fan_out, lambda workers: 100e6 * 0.6 ** (workers - 1), 2000)
    chosen = run(fan_out, per_connection, 2 * TRY_EVERY_AT_MOST)
    first = chosen.index(2)
    assert set(chosen[first : first + 4]) <= {2, 4}


def test_a_single_hiccup_changes_nothing() -> None:
    fan_out = FanOut()
    run(fan_out, per_connection, 50)
    fan_out.observe(4, LARGE, 60.0)
    assert run(fan_out, per_connection, 40).count(4) >= 35


def test_noise_does_not_hide_a_difference() -> None:
    rng = random.Random(1)
    noisy = run(FanOut(), lambda workers: contended(workers) * rng.uniform(0.8, 1.2), 400)
    assert noisy[50:].count(4) < 40
    noisy = run(FanOut(), lambda workers: per_connection(workers) * rng.uniform(0.8, 1.2), 400)
    assert noisy[50:].count(4) > 320


def test_each_size_learns_for_itself() -> None:
    fan_out = FanOut()
    run(fan_out, contended, 50, nbytes=4 * MIB)
    run(fan_out, per_connection, 50, nbytes=LARGE)
    assert run(fan_out, contended, 8, nbytes=4 * MIB).count(1) >= 6
    assert run(fan_out, per_connection, 8, nbytes=LARGE).count(4) >= 6


def test_a_try_that_was_not_measured_does_not_stall_learning() -> None:
    fan_out = FanOut()
    chosen = []
    for number in range(100):  # every other load fails
        chosen.append(fan_out.choose(LARGE, 16, 4))
        if number % 2:
            fan_out.observe(chosen[-1], LARGE, LARGE / contended(chosen[-1]))
    assert chosen[60:].count(1) > 25


def test_a_worker_less_is_no_obstacle() -> None:
    fan_out = FanOut()
    run(fan_out, per_connection, 50)
    assert set(run(fan_out, per_connection, 20, workers=3)) <= {1, 2, 3}


def test_the_rates_are_reported() -> None:
    fan_out = FanOut()
    assert fan_out.rates() == {}
    fan_out.observe(2, LARGE, 0.5)
    assert fan_out.rates() == {2: LARGE / 0.5}


def test_equal_pieces_go_around_idle_workers() -> None:
    assert assign([10] * 6, [0, 0, 0], 3) == [0, 1, 2, 0, 1, 2]


def test_the_workers_with_the_least_to_do_are_used() -> None:
    assert set(assign([10] * 4, [99, 0, 50, 0], 2)) == {1, 3}


def test_a_busy_worker_gets_less() -> None:
    assert assign([10] * 4, [25, 0], 2) == [1, 1, 1, 0]


@given(
    st.lists(st.integers(1, 100), max_size=30),
    st.lists(st.integers(0, 500), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_a_piece_starts_where_it_starts_soonest(sizes: list[int], queued: list[int], workers: int) -> None:
    workers = min(workers, len(queued))
    free = list(queued)
    used = sorted(range(len(queued)), key=lambda index: (queued[index], index))[:workers]
    for size, index in zip(sizes, assign(sizes, queued, workers), strict=True):
        assert index in used
        assert free[index] == min(free[other] for other in used)
        free[index] += size
