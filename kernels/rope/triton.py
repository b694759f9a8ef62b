"""``kernels.rope.shift.shift_keys`` for CUDA tensors, in Triton; under ``TRITON_INTERPRET=1``, set before the first
import of Triton, also for CPU tensors.

Fused multiply-adds are turned off, so that each product is rounded as in the reference.
"""
# Triton's functions are compiled from their source: mypy cannot see through the decorator.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kernels.rope.reference import Rotation, Style


def shift_keys_triton(k: torch.Tensor, rotation: Rotation, style: Style, out: torch.Tensor) -> None:
    """``kernels.rope.shift.shift_keys``; the arguments are already checked."""
    tokens, heads, head_dim = k.shape
    if out is not k:
        out.copy_(k)
    half = rotation.cos.shape[1]
    first_stride, second_offset = (1, half) if style == "neox" else (2, 1)
    _shift[(tokens, heads)](
        out,
        rotation.cos,
        rotation.sin,
        rotation.row,
        heads,
        head_dim,
        half,
        first_stride,
        second_offset,
        BLOCK=triton.next_power_of_2(half),
        enable_fp_fusion=False,
    )


@triton.jit
def _shift(k, cos, sin, row, heads, head_dim, half, first_stride, second_offset, BLOCK: tl.constexpr):  # noqa: N803
    """One head of one token, in place."""
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(row + token)
    if angle >= 0:
        pair = tl.arange(0, BLOCK)
        inside = pair < half
        first = k + (token * heads + tl.program_id(1)) * head_dim + pair * first_stride
        second = first + second_offset
        a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(second, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + angle * half + pair, mask=inside, other=0.0)
        s = tl.load(sin + angle * half + pair, mask=inside, other=0.0)
        tl.store(first, (a * c - b * s).to(k.dtype.element_ty), mask=inside)
        tl.store(second, (b * c + a * s).to(k.dtype.element_ty), mask=inside)
