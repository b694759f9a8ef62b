"""What runs of rows must let a kernel see, as dense masks: which keys each row's query attends to."""

from __future__ import annotations

import torch

from kernels.blend.rows import Runs


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
