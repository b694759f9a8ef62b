"""How many workers a load gets by its bytes, and which pieces go to which worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmanager.loading.fan_out import LEAST_BYTES_PER_WORKER, assign, workers_for

LARGE = 48 * LEAST_BYTES_PER_WORKER


def test_a_load_gets_no_worker_without_a_piece_or_without_enough_bytes() -> None:
    assert workers_for(LARGE, 16, 4) == 4
    assert workers_for(LARGE, 3, 4) == 3
    assert workers_for(2 * LEAST_BYTES_PER_WORKER, 16, 4) == 2
    assert workers_for(LEAST_BYTES_PER_WORKER - 1, 16, 4) == 1
    assert workers_for(0, 0, 4) == 1


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
