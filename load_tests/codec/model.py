"""A transformers model seen through its KV cache: compute the KV of a prefix, go on from any KV of that shape.

Everything runs on the CPU over KV that was rounded to `KV_DTYPE`, as a server in bfloat16 would store it; in float32,
unless the model was loaded otherwise: so what two runs differ by is what a codec did to the KV, and not the rounding of
the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

KV_DTYPE = torch.bfloat16
SEGMENT_TOKENS = 256
"""Tokens that are encoded together: the length of a stored segment by default."""


def load_model(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """The model for inference, in float32 unless asked otherwise."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval().requires_grad_(False)


def kv_shape(model: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head dimension)."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim


@torch.inference_mode()
def prefix_kv(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """(layers, 2, tokens, kv_heads, head_dim) in `KV_DTYPE`: what a server would store of this prefix."""
    cache = model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1).past_key_values
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
    return torch.stack(layers).transpose(2, 3).to(KV_DTYPE).contiguous()


@torch.inference_mode()
def continued(model: Any, kv: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """(len(ids), vocabulary) logits, float32, of reading `ids` after a prefix whose KV is `kv`."""
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(kv.to(model.dtype).transpose(2, 3)):
        cache.update(layer[0][None], layer[1][None], number)
    out: torch.Tensor = model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True).logits[0].float()
    return out


def segments(kv: torch.Tensor) -> Iterator[slice]:
    """The ranges of tokens that are encoded together."""
    tokens = kv.shape[2]
    for start in range(0, tokens, SEGMENT_TOKENS):
        yield slice(start, min(start + SEGMENT_TOKENS, tokens))


def divergence(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(positions,) KL divergence in nats of the next token's distribution, from logits (positions, vocabulary)."""
    p, q = torch.log_softmax(exact, -1), torch.log_softmax(other, -1)
    return (p.exp() * (p - q)).sum(-1)
