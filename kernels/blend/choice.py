"""Choice of the rows to compute: all rows without stored KV, and the reused rows whose KV changes most.

CacheBlend, arXiv 2405.16444, section 4.3: tokens whose KV deviates most at one layer do so at the next ones. The share
is one of the *reused* rows: were it one of all rows, those without any KV would take the places.
"""

from __future__ import annotations

import torch


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
