"""Causal attention for training on a CPU, registered with transformers as "blocked".

Torch's fused CPU kernel takes half of a training step at these sizes; plain bfloat16 matrix products over blocks of
queries, each seeing only the keys up to its end, are 1.5 to 2.5 times faster, forward and backward.
Serving and measuring use the stock kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

NAME = "blocked"
BLOCK = 256


def blocked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Queries (batch, heads, length, head_dim), keys and values with kv_heads → (batch, length, heads, head_dim)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2]
    query = query * scaling
    transposed = key.transpose(2, 3)
    rows = []
    for start in range(0, length, BLOCK):
        end = min(length, start + BLOCK)
        scores = torch.matmul(query[:, :, start:end], transposed[:, :, :, :end])
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores[:, :, :, start:end].masked_fill_(future, float("-inf"))
        rows.append(torch.matmul(torch.softmax(scores, -1, dtype=scores.dtype), value[:, :, :end]))
    return torch.cat(rows, 2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `attn_implementation="blocked"` known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, blocked_attention)
