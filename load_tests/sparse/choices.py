"""KV of a prefix as sparse segments keep it: which tokens, in how many bytes, and with what values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.dtypes import array_of
from kernels.sparse.kept_layer import keep, kept_tokens
from kernels.sparse.section import SparseForm
from kvmanager.extensions.sparse.budgets import Budgets
from load_tests.codec.model import segments
from load_tests.codec.questions import BLOCK_TOKENS


@dataclass(frozen=True)
class SparseKV:
    """A prefix's KV of the dense shape, of which only what ``kept (layers, kv_heads, tokens)`` says may be attended."""

    kv: torch.Tensor
    kept: torch.Tensor
    raw_bytes: int
    coded_bytes: int
    """Of all sections; 0 where nothing was packed."""


def sparse_kv(kv: torch.Tensor, mass: torch.Tensor, budgets: Budgets, form: SparseForm | None = None) -> SparseKV:
    """``kv (layers, 2, tokens, kv_heads, head_dim)`` as budgets leave it, segment by segment.

    With a form every layer goes through its bytes; what was dropped is zero then, and masked.
    """
    kept = torch.zeros(mass.shape, dtype=torch.bool)
    back = kv if form is None else torch.zeros_like(kv)
    coded_bytes = 0
    for part in segments(kv):
        tokens = part.stop - part.start
        for layer in range(len(kv)):
            count = budgets.kept_blocks(layer, tokens // BLOCK_TOKENS) * BLOCK_TOKENS
            index = kept_tokens(mass[layer, :, part].numpy(), count, min(budgets.recent, count))
            kept[layer, :, part].scatter_(1, torch.from_numpy(index.astype(np.int64)), True)
            if form is not None:
                dense = array_of(kv[layer, :, part].contiguous())
                section = form.pack(layer, keep(dense, index))
                coded_bytes += len(section)
                layer_back = form.unpack(layer, section, dense.shape, count, dense.dtype)
                heads = np.arange(dense.shape[2])[None]
                out = array_of(back[layer, :, part])
                out[0][layer_back.index.T, heads] = layer_back.keys
                out[1][layer_back.index.T, heads] = layer_back.values
    return SparseKV(back, kept, kv.nbytes, coded_bytes)
