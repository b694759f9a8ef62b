"""Rows of a sequence that are recomputed alone: the choice, and runs that a stock attention kernel masks right.

A row is a token of one long sequence whose KV lies in a paged cache. Some rows are recomputed: their queries attend to
all keys up to their own position, wherever these come from. Kernels for varying lengths take, per sequence, some last
queries and a context before them, and mask causally. A run of consecutive rows is just that: its queries are the last
ones of a sequence that ends with the run, and every run has the same block table.

The choice is CacheBlend's (arXiv 2405.16444, section 4.3): all rows without stored KV, and the reused ones whose KV
changes most. Tokens whose KV deviates most at one layer do so at the next ones. The share is one of the *reused* rows:
were it one of all rows, those without any KV would take the places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Runs(NamedTuple):
    """Runs of consecutive rows, as sequences for a kernel. Both int32, on the device of the positions."""

    starts: torch.Tensor
    """``(runs + 1,)``: which row is the first of each run, and the number of rows."""
    lengths: torch.Tensor
    """``(runs,)``: tokens of the sequence that ends with each run, its rows included."""
    longest: int
    """Rows of the longest run."""
    context: int
    """Largest of ``lengths``."""


def runs_of(positions: torch.Tensor) -> Runs:
    """The runs of ``positions``, int64 ``(rows,)``, strictly ascending. Raises ValueError for none, or another order.

    O(rows); on a GPU it waits for the device.
    """
    if positions.dim() != 1 or not len(positions) or (positions[1:] <= positions[:-1]).any():
        raise ValueError("positions must be ascending, and at least one")
    first = torch.ones_like(positions, dtype=torch.bool)
    first[1:] = positions[1:] != positions[:-1] + 1
    starts = first.nonzero().flatten()
    ends = torch.cat((starts[1:], starts.new_tensor([len(positions)])))
    lengths = positions[ends - 1] + 1
    bounds = torch.cat((starts[:1], ends)).to(torch.int32)
    return Runs(bounds, lengths.to(torch.int32), int((ends - starts).max()), int(lengths[-1]))


def slots_of(positions: torch.Tensor, block_ids: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where the KV of ``positions`` lies in a paged cache, int64 ``(rows,)``; ``block_ids``: the sequence's blocks."""
    return block_ids[positions // block_size].long() * block_size + positions % block_size


def change_of(new: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of values from those stored, float32 ``(rows,)``; both ``(rows, kv_heads, dim)``."""
    return (new.float() - stored.float()).square().sum((1, 2))


def rows_to_compute(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return the rows to compute, int64, ascending: those not ``reused``, and the top ``ratio`` of those that are.

    ``change``: float ``(rows,)``, read for reused rows only; ``reused``: bool ``(rows,)``. NaN counts as the largest
    change. Raises ValueError for a ratio outside 0 to 1.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"a ratio is 0 to 1, got {ratio}")
    candidates = reused.nonzero().flatten()
    scores = change[candidates].float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    top = candidates[scores.topk(round(ratio * len(candidates))).indices]
    return torch.cat((top, (~reused).nonzero().flatten())).sort().values
