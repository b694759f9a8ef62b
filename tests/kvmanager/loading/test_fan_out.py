"""How many workers a load gets by its bytes and by what one connection brings, and which pieces go to whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmanager.loading.fan_out import LEAST_BYTES_PER_WORKER, MEASURE_EVERY, PROCESSOR_BYTES_PER_S, FanOut, assign

MIB = 1 << 20
LARGE = 48 * MIB
SLOW = PROCESSOR_BYTES_PER_S / 2
FAST = PROCESSOR_BYTES_PER_S * 2


def run(fan_out: FanOut, connection: float, loads: int, nbytes: int = LARGE) -> list[int]:
    """What was chosen of four workers in each of so many loads, if one connection brings so many bytes per second."""
    chosen = []
    for _ in range(loads):
        chosen.append(fan_out.choose(nbytes, 16, 4, alone=True))
        if chosen[-1] == 1:
            fan_out.measured(nbytes, nbytes / connection)
    return chosen


def known(connection: float, processors: int = 2) -> FanOut:
    fan_out = FanOut(processors)
    run(fan_out, connection, 1)
    return fan_out


def test_the_first_load_that_is_alone_measures_the_connection() -> None:
    fan_out = FanOut(2)
    assert fan_out.connection_bytes_per_s is None
    assert fan_out.choose(LARGE, 16, 4, alone=False) == 4, "beside others there is nothing to measure"
    assert fan_out.choose(LARGE, 16, 4, alone=True) == 1
    fan_out.measured(LARGE, 0.5)
    assert fan_out.connection_bytes_per_s == 2 * LARGE


def test_a_load_gets_no_worker_without_a_piece_or_without_enough_bytes() -> None:
    fan_out = known(SLOW)
    assert fan_out.choose(LARGE, 3, 4, alone=True) == 3
    assert fan_out.choose(2 * LEAST_BYTES_PER_WORKER, 16, 4, alone=True) == 2
    assert fan_out.choose(LEAST_BYTES_PER_WORKER - 1, 16, 4, alone=True) == 1
    assert fan_out.choose(0, 0, 4, alone=True) == 1


def test_all_workers_are_used_where_the_connection_is_the_limit() -> None:
    assert set(run(known(SLOW), SLOW, MEASURE_EVERY)) == {4}


def test_half_the_processors_are_used_where_they_are_the_limit() -> None:
    assert [known(FAST, processors).choose(LARGE, 16, 4, alone=True) for processors in (1, 2, 4, 6, 64)] == [
        1, 1, 2, 3, 4,
    ]  # fmt: skip


def test_on_a_slow_connection_a_load_in_many_measures_it_again() -> None:
    chosen = run(known(SLOW), SLOW, 10 * MEASURE_EVERY)
    assert 5 <= chosen.count(1) <= 10
    assert chosen.count(1) + chosen.count(4) == len(chosen)


def test_small_loads_measure_by_the_way() -> None:
    fan_out = known(SLOW)
    for _ in range(10):
        assert 1 not in run(fan_out, SLOW, MEASURE_EVERY // 2)
        assert run(fan_out, SLOW, 1, nbytes=LEAST_BYTES_PER_WORKER) == [1]


def test_a_connection_that_becomes_slow_gets_more_workers_soon_and_back_in_time() -> None:
    fan_out = known(FAST)
    assert set(run(fan_out, FAST, 20)) == {1}
    assert set(run(fan_out, SLOW, 10)[3:]) == {4}
    assert set(run(fan_out, FAST, 4 * MEASURE_EVERY)[-10:]) == {1}


def test_a_single_hiccup_changes_nothing() -> None:
    fan_out = known(FAST)
    run(fan_out, FAST, 5)
    fan_out.measured(LARGE, 60.0)
    assert fan_out.choose(LARGE, 16, 4, alone=True) == 1


def test_what_is_mostly_overhead_says_nothing_of_the_connection() -> None:
    fan_out = FanOut(2)
    fan_out.measured(LEAST_BYTES_PER_WORKER - 1, 1.0)
    fan_out.measured(LARGE, 0.0)
    assert fan_out.connection_bytes_per_s is None


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
