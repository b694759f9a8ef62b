"""``kernels.rope.shift.shift_keys`` in plain torch, on any device: what the fast versions are held to.

Every product and every sum is rounded to float32 by itself, and the result once more to the keys' dtype.
"""

from typing import Literal, NamedTuple

import torch

Style = Literal["neox", "gptj"]


class Rotation(NamedTuple):
    """How far each token's keys turn.

    ``cos`` and ``sin``: float32 ``(angles, rotary_dim / 2)``. ``row``: int64 ``(tokens,)``, the token's row of them, or
    -1 for a token that stays as it is, to the bit.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    row: torch.Tensor


def shift_keys_reference(k: torch.Tensor, rotation: Rotation, style: Style, out: torch.Tensor) -> None:
    """Turn ``k (tokens, kv_heads, head_dim)`` by ``rotation`` into ``out``, which may be ``k``; already checked."""
    rotary_dim = 2 * rotation.cos.shape[1]
    row = rotation.row.clamp(min=0)
    cos, sin = rotation.cos[row].unsqueeze(1), rotation.sin[row].unsqueeze(1)
    if style == "neox":
        first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    else:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    a, b = k[..., first].float(), k[..., second].float()
    turned = k.clone()
    turned[..., first] = (a * cos - b * sin).to(k.dtype)
    turned[..., second] = (b * cos + a * sin).to(k.dtype)
    out.copy_(torch.where((rotation.row < 0).view(-1, 1, 1), k, turned))
