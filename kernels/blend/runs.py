"""Runs of consecutive rows as sequences of their own, so that a stock paged attention kernel sees the true causal mask.

A row is a token of one long sequence whose KV lies in a paged cache. Some rows are recomputed: their queries attend to
all keys up to their own position, wherever these come from. Kernels for varying lengths take, per sequence, some last
queries and a context before them, and mask causally. A run of consecutive rows is just that: its queries are the last
ones of a sequence that ends with the run, and every run has the same block table.
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
