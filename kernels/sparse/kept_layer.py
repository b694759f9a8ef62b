"""The kept part of a layer: kept keys and values, and which tokens they are. No array, and none can be made of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.dtypes import DTYPES, Array
from kernels.sparse.choice import MOST_TOKENS, Index


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
