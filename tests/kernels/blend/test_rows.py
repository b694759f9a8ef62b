"""Runs of rows let a kernel see the true mask; every row without KV is computed, and the share is one of the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.blend.rows import Runs, change_of, rows_to_compute, runs_of, slots_of
from tests.quantities import up_to

ROWS = st.sets(st.integers(0, 200), min_size=1).map(sorted)


def true_mask(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """bool ``(rows, keys)``: every key up to the row's own position."""
    return torch.arange(keys)[None, :] <= positions[:, None]


def seen_through(runs: Runs, keys: int) -> torch.Tensor:
    """bool ``(rows, keys)``: what a causal kernel for varying lengths lets the rows of each run see.

    Query number i of q in a sequence of n tokens sees the first ``n - q + i + 1`` keys.
    """
    seen = []
    for run, length in enumerate(runs.lengths.tolist()):
        queries = int(runs.starts[run + 1] - runs.starts[run])
        upto = torch.arange(length - queries + 1, length + 1)
        seen.append(torch.arange(keys)[None, :] < upto[:, None])
    return torch.cat(seen)


@given(ROWS)
def test_runs_of_any_rows_let_them_see_what_lies_before_them_and_nothing_else(rows: list[int]) -> None:
    positions = torch.tensor(rows)
    runs = runs_of(positions)
    assert torch.equal(seen_through(runs, 210), true_mask(positions, 210))
    assert runs.starts.tolist()[-1] == len(rows)
    assert runs.longest == max(b - a for a, b in zip(runs.starts.tolist(), runs.starts.tolist()[1:], strict=False))
    assert runs.context == rows[-1] + 1
    assert len(runs.lengths) == sum(row - 1 not in rows for row in rows)


@pytest.mark.parametrize("rows", [[], [3, 3], [4, 2]])
def test_rows_that_are_none_or_in_another_order_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        runs_of(torch.tensor(rows, dtype=torch.int64))


def test_a_slot_is_found_through_the_block_table() -> None:
    slots = slots_of(torch.tensor([0, 3, 4, 9]), torch.tensor([7, 2, 5]), 4)
    assert slots.tolist() == [28, 31, 8, 21]


@given(
    st.lists(st.tuples(st.integers(0, 6400).map(lambda part: part / 64), st.booleans()), min_size=1, max_size=60),
    up_to(1.0),
)
def test_every_row_without_kv_is_computed_and_the_top_share_of_the_reused_ones(
    rows: list[tuple[float, bool]], ratio: float
) -> None:
    change = torch.tensor([change for change, _ in rows])
    reused = torch.tensor([is_reused for _, is_reused in rows])
    chosen = rows_to_compute(change, reused, ratio)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set((~reused).nonzero().flatten().tolist()) <= set(chosen.tolist())
    of_reused = [row for row in chosen.tolist() if reused[row]]
    assert len(of_reused) == round(ratio * int(reused.sum()))
    left = [float(change[row]) for row in range(len(rows)) if reused[row] and row not in of_reused]
    assert not left or not of_reused or max(left) <= min(float(change[row]) for row in of_reused)


def test_what_is_no_number_counts_as_changed_most() -> None:
    change = torch.tensor([1.0, float("nan"), 2.0])
    assert rows_to_compute(change, torch.ones(3, dtype=torch.bool), 1 / 3).tolist() == [1]


def test_the_change_of_a_row_is_over_its_heads_and_dimensions() -> None:
    new, stored = torch.zeros(2, 2, 3, dtype=torch.bfloat16), torch.zeros(2, 2, 3)
    stored[1, 0, 2], stored[1, 1, 0] = 2.0, -1.0
    assert change_of(new, stored).tolist() == [0.0, 5.0]


def test_a_share_is_none_below_0_or_above_1() -> None:
    with pytest.raises(ValueError, match="ratio"):
        rows_to_compute(torch.zeros(1), torch.ones(1, dtype=torch.bool), 1.5)
