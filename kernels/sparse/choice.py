"""Choice of the tokens of a layer to keep: those with the largest mass, for each KV head its own, equally many for all.

Equally many, in whole blocks, because the engine gives a layer one length and one block table for all its heads
(`kvmanager.extensions.sparse.budgets` says how many). Pure functions on numpy arrays: any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.dtypes import Array

Index = np.ndarray[Any, np.dtype[np.uint16]]
"""(kv_heads, kept): the tokens kept of a segment, ascending in each head."""

MOST_TOKENS = 1 << 16
"""Of a segment, so that an index fits two bytes."""


def kept_tokens(mass: Array, count: int, recent: int = 0) -> Index:
    """The ``count`` tokens of largest ``mass (kv_heads, tokens)``, among them the last ``recent`` (H2O's rule).

    Of equal masses the earlier token is kept, so equal masses give equal choices on every machine; one that is not a
    number is the least. Raises ValueError for a count that is not between 1 and the tokens, or below ``recent``.
    """
    if mass.ndim != 2 or mass.size == 0 or mass.shape[1] > MOST_TOKENS:
        raise ValueError(f"a mass is (kv_heads, 1 to {MOST_TOKENS} tokens), got {mass.shape}")
    tokens = mass.shape[1]
    if not 1 <= count <= tokens or not 0 <= recent <= count:
        raise ValueError(f"of {tokens} tokens {count} cannot be kept, {recent} of them the last")
    older = tokens - recent
    ranked = np.nan_to_num(mass[:, :older].astype(np.float32), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    order = np.argsort(-ranked, axis=1, kind="stable")[:, : count - recent]
    last = np.broadcast_to(np.arange(older, tokens), (len(mass), recent))
    index: Index = np.concatenate((np.sort(order, axis=1), last), axis=1).astype(np.uint16)
    return index
