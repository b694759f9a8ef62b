"""Writes kept keys and values into the right-aligned slots of vLLM's cache. Any thread; one per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.paged.gather_scatter import scatter
from kernels.paged.layout import PagedLayout


@dataclass(frozen=True)
class RetainedSlots:
    """`layers` are vLLM's per-layer tensors, in layer order."""

    layers: Sequence[torch.Tensor]
    layout: PagedLayout

    def write(self, block_ids: Sequence[int], layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write kept tokens of one layer into `block_ids`, in their order, and into no other block.

        `keys` and `values` are `(tokens, kv_heads, head_dim)`, `tokens` those of the blocks; keys have the rotary phase
        of their own places. Row i may be another token in each head: head h's rows are its own kept tokens, in order.
        Raises ValueError, before anything is written, for what does not fit.
        """
        expected = self.layout.segment_shape(1, len(block_ids))[2:]
        if keys.shape != expected or values.shape != expected:
            raise ValueError(f"{len(block_ids)} blocks keep {expected}, not {tuple(keys.shape)}, {tuple(values.shape)}")
        if block_ids:
            scatter([self.layers[layer]], block_ids, self.layout, torch.stack((keys, values))[None])
