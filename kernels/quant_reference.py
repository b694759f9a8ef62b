"""The quantizers of ``kernels.quant`` in plain torch, on any device: what the fast versions are held to.

All arithmetic is in float32, one rounding per operation. A code is the value times the *inverse* of its scale, rounded
half to even: one division per group or channel, not per element. The two product-sums of decoding are exact before
their last rounding (an 8-bit code times an 11-bit scale fits a float32), so fused operations change no bit.

The arguments are already checked.
"""

import torch

from kernels.packing import pack_reference, unpack_reference

# What a grouped or vector-wise value is clamped to. No KV is near it, and with it no scale, zero or decoded value
# leaves float16, whose largest is 65504.
LARGEST = 2.0**15

SMALLEST_NORMAL = 2.0**-126  # of float32; the inverse of a smaller one may be infinite


def quantize_groups_reference(
    x: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``kernels.quant.quantize_groups``."""
    rows, cols = x.shape
    values = finite(x).view(rows, cols // group, group)
    scale, zero = group_parameters(values.amin(-1), values.amax(-1), bits)
    codes = (values - zero.float().unsqueeze(-1)) * inverse(scale.float()).unsqueeze(-1)
    codes = codes.round().clamp(0, 2**bits - 1).to(torch.uint8).view(rows, cols)
    return pack_reference(codes, bits), scale, zero


def dequantize_groups_reference(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, out: torch.Tensor
) -> None:
    """``kernels.quant.dequantize_groups``."""
    rows, cols = out.shape
    values = unpack_reference(codes, bits, cols).view(*scale.shape, -1).float()
    out.copy_((values * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)).view(rows, cols))


def quantize_vectors_reference(x: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.quant.quantize_vectors``."""
    values = finite(x)
    scale = vector_scale(values.abs().amax(-1))
    codes = torch.bucketize(values * inverse(scale.float()).unsqueeze(-1), boundaries(codebook))
    return pack_reference(codes.to(torch.uint8), bits_of(codebook)), scale


def dequantize_vectors_reference(
    codes: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor, out: torch.Tensor
) -> None:
    """``kernels.quant.dequantize_vectors``."""
    levels = codebook[unpack_reference(codes, bits_of(codebook), out.shape[1]).long()]
    out.copy_(levels * scale.float().unsqueeze(-1))


def quantize_steps_reference(x: torch.Tensor, step: torch.Tensor, limit: int) -> torch.Tensor:
    """``kernels.quant.quantize_steps``."""
    steps = (x.float() * inverse(step)).nan_to_num(nan=0.0)
    return (steps.clamp(-limit, limit).round() + limit).to(torch.uint8)


def dequantize_steps_reference(symbols: torch.Tensor, step: torch.Tensor, limit: int, out: torch.Tensor) -> None:
    """``kernels.quant.dequantize_steps``."""
    out.copy_((symbols.float() - limit) * step)


def finite(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32: NaN is 0, and everything is within ``LARGEST``."""
    return x.float().nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)


def group_parameters(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero, float16, of groups whose least and largest values are ``low`` and ``high``, float32.

    Zero is rounded down and scale up, so that the codes reach from ``low`` to ``high`` and no value is further than
    half a scale from a code; rounded to nearest, a small scale would leave the ends of its group outside.
    """
    zero = _float16_below(low + 0.0)  # + 0.0: which of -0.0 and 0.0 is the least is up to the device
    return _float16_above((high - zero.float()) * (1 / (2**bits - 1))), zero


def vector_scale(largest: torch.Tensor) -> torch.Tensor:
    """The scale, float16, of vectors whose largest absolute values are ``largest``, float32: no value exceeds it."""
    return _float16_above(largest)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, float32, and 0 where that could be infinite: a constant group has code 0, a step of 0 symbol 0."""
    return torch.where(scale >= SMALLEST_NORMAL, 1.0 / scale, 0.0)


def boundaries(codebook: torch.Tensor) -> torch.Tensor:
    """The middles between neighbouring levels, float32: a value on one takes the lower level."""
    return (codebook[:-1] + codebook[1:]) * 0.5


def bits_of(codebook: torch.Tensor) -> int:
    """log2 of the number of levels."""
    return len(codebook).bit_length() - 1


def _float16_above(values: torch.Tensor) -> torch.Tensor:
    return -_float16_below(-values)


def _float16_below(values: torch.Tensor) -> torch.Tensor:
    """The largest float16 that is no larger than the float32."""
    nearest = values.half()
    bits = nearest.view(torch.int16)
    next_below = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -0x7FFF))  # -0x7FFF: 0x8001
    return torch.where(nearest.float() > values, next_below, bits).to(torch.int16).view(torch.float16)
