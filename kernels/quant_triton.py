"""The quantizers of ``kernels.quant`` for CUDA tensors, in Triton; under ``TRITON_INTERPRET=1``, set before the first
import of Triton, also for CPU tensors.

They compute as ``quant_reference.py`` does, operation by operation. Decoding is exact before its last rounding, so it
is the same bits with fused operations too. In encoding nothing can fuse: a difference is multiplied, then clamped
before it is rounded. The one division is asked for correctly rounded.
"""
# Triton's functions are compiled from their source: mypy cannot see through the decorator.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kernels import quant_reference as reference
from kernels.packing import packed_bytes

BLOCK = 512  # columns or bytes per program, where a row has so many

LARGEST = tl.constexpr(reference.LARGEST)
SMALLEST_NORMAL = tl.constexpr(reference.SMALLEST_NORMAL)
HALF_EVEN = tl.constexpr(1.5 * 2**23)  # added and subtracted, it rounds a small float32 to an integer, half to even


def quantize_groups_triton(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``kernels.quant.quantize_groups``; the arguments are already checked, and contiguous."""
    rows, cols = x.shape
    groups = cols // group
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=x.device)
    scale, zero = torch.empty(2, rows, groups, dtype=torch.float16, device=x.device)
    top = 2**bits - 1
    _encode_group[(rows * groups,)](x, codes, scale, zero, group, top, 1 / top, BLOCK=triton.next_power_of_2(group))
    if bits == 8:
        return codes, scale, zero
    packed = torch.empty(rows, packed_bytes(cols, bits), dtype=torch.uint8, device=x.device)
    _pack[(rows, triton.cdiv(packed.shape[1], BLOCK))](codes, packed, cols, packed.shape[1], BITS=bits, BLOCK=BLOCK)
    return packed, scale, zero


def dequantize_groups_triton(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, out: torch.Tensor
) -> None:
    """``kernels.quant.dequantize_groups``; as above."""
    rows, cols = out.shape
    groups = scale.shape[1]
    grid = (rows, triton.cdiv(cols, BLOCK))
    _decode_groups[grid](codes, scale, zero, out, cols, groups, cols // groups, codes.shape[1], BITS=bits, BLOCK=BLOCK)


def quantize_steps_triton(x: torch.Tensor, step: torch.Tensor, limit: int) -> torch.Tensor:
    """``kernels.quant.quantize_steps``; as above."""
    tokens, channels = x.shape
    symbols = torch.empty(tokens, channels, dtype=torch.uint8, device=x.device)
    grid = (tokens, triton.cdiv(channels, BLOCK))
    _encode_steps[grid](x, reference.inverse(step), symbols, channels, float(limit), BLOCK=BLOCK)
    return symbols


def dequantize_steps_triton(symbols: torch.Tensor, step: torch.Tensor, limit: int, out: torch.Tensor) -> None:
    """``kernels.quant.dequantize_steps``; as above."""
    tokens, channels = out.shape
    _decode_steps[(tokens, triton.cdiv(channels, BLOCK))](symbols, step, out, channels, float(limit), BLOCK=BLOCK)


@triton.jit
def _encode_group(x, codes, scale, zero, group, top, per_code, BLOCK: tl.constexpr):  # noqa: N803
    """One group: its scale and zero, and its codes as bytes."""
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < group
    values = tl.load(x + index * group + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(values == values, values, 0.0)  # NaN
    values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
    low = tl.min(tl.where(inside, values, LARGEST))
    high = tl.max(tl.where(inside, values, -LARGEST))
    z = _float16_below(low + 0.0)
    s = -_float16_below(-((high - z.to(tl.float32)) * per_code))
    inverse = tl.where(s > 0, tl.div_rn(1.0, tl.maximum(s.to(tl.float32), SMALLEST_NORMAL)), 0.0)
    code = tl.minimum(tl.maximum((values - z.to(tl.float32)) * inverse, 0.0), top)
    code = (code + HALF_EVEN) - HALF_EVEN
    tl.store(codes + index * group + column, code.to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(scale + index, s)
    tl.store(zero + index, z)


@triton.jit
def _float16_below(value):
    """The largest float16 that is no larger than the float32."""
    nearest = value.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7FFF
    next_below = tl.where(magnitude == 0, -0x7FFF, tl.where(bits > 0, bits - 1, bits + 1))
    chosen = tl.where(nearest.to(tl.float32) > value, next_below, bits)
    return chosen.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _pack(codes, packed, cols, packed_cols, BITS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Each byte gathers the codes that reach into it: at most five, of 2 bits, or parts of them."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = byte * 8 // BITS
    word = tl.zeros((BLOCK,), dtype=tl.int32)
    for place in tl.static_range(7 // BITS + 2):
        column = first + place
        inside = (byte < packed_cols) & (column < cols)
        code = tl.load(codes + row * cols + column, mask=inside, other=0).to(tl.int32)
        # Shifted up by 8 first: the first code may begin before the byte.
        word |= tl.where(column * BITS < byte * 8 + 8, code << tl.minimum(column * BITS - byte * 8 + 8, 15), 0)
    tl.store(packed + row * packed_cols + byte, ((word >> 8) & 255).to(tl.uint8), mask=byte < packed_cols)


@triton.jit
def _decode_groups(
    codes,
    scale,
    zero,
    out,
    cols,
    groups,
    group,
    packed_cols,
    BITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < cols
    byte = column * BITS // 8
    word = tl.load(codes + row * packed_cols + byte, mask=inside, other=0).to(tl.int32)
    if 8 % BITS:  # a code may reach into the next byte
        beyond = inside & (byte + 1 < packed_cols)
        word |= tl.load(codes + row * packed_cols + byte + 1, mask=beyond, other=0).to(tl.int32) << 8
    code = ((word >> (column * BITS % 8)) & ((1 << BITS) - 1)).to(tl.float32)
    s = tl.load(scale + row * groups + column // group, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(zero + row * groups + column // group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * cols + column, (code * s + z).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _encode_steps(x, inverse, symbols, channels, limit, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    values = tl.load(x + row * channels + column, mask=inside, other=0.0).to(tl.float32)
    steps = values * tl.load(inverse + column, mask=inside, other=0.0)
    steps = tl.where(steps == steps, steps, 0.0)  # NaN
    steps = tl.minimum(tl.maximum(steps, -limit), limit)
    steps = (steps + HALF_EVEN) - HALF_EVEN
    tl.store(symbols + row * channels + column, (steps + limit).to(tl.int32).to(tl.uint8), mask=inside)


@triton.jit
def _decode_steps(symbols, step, out, channels, limit, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    values = tl.load(symbols + row * channels + column, mask=inside, other=0).to(tl.float32) - limit
    values *= tl.load(step + column, mask=inside, other=0.0)
    tl.store(out + row * channels + column, values.to(out.dtype.element_ty), mask=inside)
