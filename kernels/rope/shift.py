"""Shift keys to other positions: rotary position embedding (RoPE, arXiv 2104.09864, section 3.2) is a rotation, and
rotations add, so a key rotated for position ``p`` and then by ``delta`` is the key rotated for ``p + delta``.

It is how a chunk's cached keys serve at another place of a prompt; values carry no position. What a model multiplies
its rotated keys with (YaRN's attention factor) passes through unchanged. It does not hold for a model whose frequencies
depend on the length of its input (dynamic NTK, LongRoPE), unless both positions had the same ones.

Any thread may call ``shift_keys``. On the CPU a call runs on the calling thread and gives up the GIL while it computes.
"""

import torch

from kernels.rope.cpu import shift_keys_cpu
from kernels.rope.reference import Rotation, Style

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def shift_keys(
    k: torch.Tensor, delta: int | torch.Tensor, inv_freq: torch.Tensor, style: Style, out: torch.Tensor | None = None
) -> None:
    """Turn ``k`` by ``delta`` positions, in place, or into ``out``, which is like ``k`` and shares no memory with it.

    ``k``: contiguous ``(tokens, kv_heads, head_dim)``, bfloat16, float16 or float32. ``delta``: positions, of either
    sign; one for all tokens, or int64 ``(tokens,)``. ``inv_freq``: float32 ``(rotary_dim / 2,)``, radians per position,
    already scaled where the model scales them (YaRN); dimensions from ``rotary_dim`` on stay as they are. ``style``:
    which dimensions make a pair, ``neox`` ``(i, i + rotary_dim / 2)``, ``gptj`` ``(2 * i, 2 * i + 1)``.

    Angles are computed in float64 and the rotation in float32, rounded once to the dtype of ``k``. A token whose delta
    is 0 keeps its bits. Raises ValueError, before anything is written, when an argument does not fit.
    """
    target = k if out is None else out
    _check(k, delta, inv_freq, style, target)
    turn = rotation(delta, inv_freq, len(k))
    if k.is_cpu:
        shift_keys_cpu(k, turn, style, target)
        return
    from kernels.rope.triton import shift_keys_triton

    shift_keys_triton(k, turn, style, target)


def rotation(delta: int | torch.Tensor, inv_freq: torch.Tensor, tokens: int) -> Rotation:
    """The rotation of ``tokens`` keys by ``delta``: one row per distinct delta, because chunks move as one.

    In float64, because a delta of 100,000 positions in float32 would leave an angle wrong by some hundredths.
    """
    deltas = torch.as_tensor(delta, dtype=torch.int64, device=inv_freq.device).expand(tokens)
    if isinstance(delta, int):
        distinct, row = deltas[:1], torch.zeros_like(deltas)
    else:
        distinct, row = torch.unique(deltas, return_inverse=True)
    angles = distinct.double().unsqueeze(1) * inv_freq.double()
    return Rotation(angles.cos().float(), angles.sin().float(), torch.where(deltas == 0, -1, row))


def _check(k: torch.Tensor, delta: int | torch.Tensor, inv_freq: torch.Tensor, style: str, out: torch.Tensor) -> None:
    """Refuse what would read or write outside the tensors: compiled code checks nothing."""
    if k.dim() != 3 or k.numel() == 0 or k.dtype not in FLOATS or not k.is_contiguous():
        raise ValueError(
            "keys must be contiguous (tokens, kv_heads, head_dim) of bfloat16, float16 or float32, "
            f"got {tuple(k.shape)} of {k.dtype}, stride {k.stride()}"
        )
    if not (k.is_cpu or k.is_cuda):
        raise ValueError(f"need a CPU or CUDA tensor, got one on {k.device}")
    if out.shape != k.shape or out.dtype is not k.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {tuple(k.shape)} of {k.dtype}, got {tuple(out.shape)} of {out.dtype}")
    if inv_freq.dim() != 1 or inv_freq.dtype is not torch.float32 or not 2 <= 2 * len(inv_freq) <= k.shape[-1]:
        raise ValueError(
            f"inv_freq must be float32 of 1 to {k.shape[-1] // 2} frequencies, "
            f"got {tuple(inv_freq.shape)} of {inv_freq.dtype}"
        )
    if style not in ("neox", "gptj"):
        raise ValueError(f'the style is "neox" or "gptj", got {style!r}')
    if isinstance(delta, torch.Tensor) and (delta.shape != k.shape[:1] or delta.dtype is not torch.int64):
        raise ValueError(f"delta must be int64 ({len(k)},) or an int, got {tuple(delta.shape)} of {delta.dtype}")
    tensors = [out, inv_freq, delta] if isinstance(delta, torch.Tensor) else [out, inv_freq]
    if any(tensor.device != k.device for tensor in tensors):
        raise ValueError(f"every tensor must be on {k.device}, as the keys are")
