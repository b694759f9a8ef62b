"""The kept part of a layer: the choice of its tokens, and their keys and values, of which no array can be made.

Kept are the tokens with the largest mass, for each KV head its own, equally many for all, in whole blocks: the engine
gives a layer one length and one block table for all its heads (`kvmanager.extensions.sparse.budgets` says how many).
Pure functions on numpy arrays: any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.dtypes import DTYPES, Array

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


@dataclass(frozen=True, eq=False)
class KeptLayer:
    """A layer of a sparse segment. Raises ValueError for parts that do not belong together.

    Row i of a head's ``keys`` and ``values`` is the token ``index[head, i]`` of the segment, keys with the rotary phase
    of that token's place: other heads have other tokens in row i. It is deliberately no array and has neither shape nor
    dtype, so that code which expects a dense layer fails at once.
    """

    keys: Array
    """(kept, kv_heads, head_dim)"""
    values: Array
    """(kept, kv_heads, head_dim)"""
    index: Index
    """(kv_heads, kept), ascending in each head"""
    tokens: int
    """Of the segment, kept or not."""

    def __post_init__(self) -> None:
        kept, heads = self.keys.shape[:2] if self.keys.ndim == 3 else (0, 0)
        if not 1 <= kept <= self.tokens <= MOST_TOKENS or self.keys.shape != self.values.shape:
            raise ValueError(f"keys {self.keys.shape} and values {self.values.shape} are not kept of {self.tokens}")
        if self.keys.dtype != self.values.dtype or self.keys.dtype not in DTYPES.values():
            raise ValueError(f"keys of {self.keys.dtype} and values of {self.values.dtype} are not KV of one model")
        if self.index.shape != (heads, kept) or int(self.index[:, -1].max()) >= self.tokens:
            raise ValueError(
                f"an index {self.index.shape} does not name {kept} of {self.tokens} tokens in {heads} heads"
            )
        if (np.diff(self.index.astype(np.int64), axis=1) <= 0).any():
            raise ValueError("an index names each token once, in ascending order")

    def __array__(self, *_: object, **__: object) -> Array:
        raise TypeError("a sparse layer is not a dense one: its rows are other tokens in each head")


def keep(kv: Array, index: Index) -> KeptLayer:
    """What ``index (kv_heads, kept)`` leaves of a dense layer ``kv (2, tokens, kv_heads, head_dim)``; copies.

    Raises ValueError for an index that is not the layer's.
    """
    if kv.ndim != 4 or kv.shape[0] != 2 or index.ndim != 2 or index.shape[0] != kv.shape[2]:
        raise ValueError(f"an index {index.shape} is not one of a layer {kv.shape}")
    if index.size == 0 or int(index.max()) >= kv.shape[1]:
        raise ValueError(f"an index names tokens that a layer {kv.shape} does not have")
    heads = np.arange(kv.shape[2])[None]
    keys, values = (np.ascontiguousarray(half[index.T, heads]) for half in kv)
    return KeptLayer(keys, values, index, kv.shape[1])
