"""Attention mass of each token's key, from a sample of queries.

H2O (NeurIPS 2023, arXiv 2306.14048) keeps the tokens with the largest sums of attention weights. Here the sum is over
every 16th query instead of all, and it is divided by the number of queries that could see the key: else early tokens
look important because they were there for longer. Query heads that share a KV head are summed, for they share its fate.

The softmax is over the keys at hand, those of one segment: what is compared are tokens of one segment and one KV head,
so what a query gives to other segments does not matter. Pure functions on numpy arrays: any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.dtypes import Array, to_float32

SAMPLED_EVERY = 16
"""Queries: their copies are then a few KB per layer and segment, and the softmax some 1 % of a prefill."""

Mass = np.ndarray[Any, np.dtype[np.float16]]
"""(kv_heads, tokens): mean attention of a query that could see the key, summed over the query heads of its group."""


def attention_mass(queries: Array, query_positions: Array, keys: Array, first_position: int, scale: float) -> Mass:
    """The mass that each of ``keys`` gets from ``queries``, both with their rotary phase.

    ``queries (n, query_heads, head_dim)`` are a sample, at ``query_positions (n,)`` of the sequence; ``keys (tokens,
    kv_heads, head_dim)`` lie at ``first_position`` and on. ``scale``: of the model's attention, mostly ``head_dim **
    -0.5``. Both in one of `kernels.dtypes.DTYPES`. A query sees the keys at its own position and before. A key that no
    query of the sample sees has mass 0. Raises ValueError for shapes that do not belong together.
    """
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[2] != keys.shape[2] or queries.shape[1] % keys.shape[1]:
        raise ValueError(f"queries {queries.shape} and keys {keys.shape} are not of one model")
    if query_positions.shape != queries.shape[:1]:
        raise ValueError(f"{queries.shape[0]} queries have {query_positions.shape} positions")
    tokens, kv_heads, dim = keys.shape
    group = queries.shape[1] // kv_heads
    of_key = first_position + np.arange(tokens)
    sees = query_positions[:, None] >= of_key[None]  # (n, tokens)
    useful = sees.any(1)
    sees, count = sees[useful], sees.sum(0)
    if not len(sees):
        return np.zeros((kv_heads, tokens), np.float16)
    q = to_float32(queries[useful]).reshape(-1, kv_heads, group, dim).transpose(1, 2, 0, 3)  # (heads, group, n, dim)
    scores = (q @ to_float32(keys).transpose(1, 2, 0)[:, None]) * np.float32(scale)  # (heads, group, n, tokens)
    scores[:, :, ~sees] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mass: Mass = (weights.sum((1, 2)) / np.maximum(count, 1)).astype(np.float16)
    return mass
