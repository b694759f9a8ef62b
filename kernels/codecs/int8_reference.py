"""``int8`` in plain torch: what the compiled version is held to.

All arithmetic is in float32, one rounding per operation. A code is the value times the *inverse* of its scale, rounded
half to even: one division per vector, not per element. The product and the sum of decoding are exact before their last
rounding (an 8-bit code times an 11-bit scale fits a float32), so fused operations change no bit.
"""

import torch

from kernels.codecs.int8_cpu import LARGEST, SMALLEST_NORMAL, TOP


def quantize_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernels.codecs.int8_cpu.quantize`."""
    values = x.float().nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)
    scale, zero = parameters(values.amin(-1), values.amax(-1))
    codes = (values - zero.float().unsqueeze(-1)) * inverse(scale).unsqueeze(-1)
    return codes.round().clamp(0, TOP).to(torch.uint8), scale, zero


def dequantize_reference(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, out: torch.Tensor) -> None:
    """`kernels.codecs.int8_cpu.dequantize`."""
    out.copy_(codes.float() * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1))


def parameters(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero, float16, of vectors whose least and largest values are ``low`` and ``high``, float32.

    Zero is rounded down and scale up, so that the codes reach from ``low`` to ``high`` and no value is further than
    half a scale from a code; rounded to nearest, a small scale would leave the ends of its vector outside.
    """
    low, high = low + 0.0, high + 0.0  # which of -0.0 and 0.0 is found is up to the version; 0.0 is kept
    zero = _float16_below(low)
    return -_float16_below(-(high - zero.float()) * (1 / TOP)), zero


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, float32, and 0 where that could be infinite: every code of a constant vector is 0."""
    wide = scale.float()
    return torch.where(wide >= SMALLEST_NORMAL, 1.0 / wide, 0.0)


def _float16_below(values: torch.Tensor) -> torch.Tensor:
    """The largest float16 that is no larger than the float32."""
    nearest = values.half()
    bits = nearest.view(torch.int16)
    next_below = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -0x7FFF))  # -0x7FFF: 0x8001
    return torch.where(nearest.float() > values, next_below, bits).to(torch.int16).view(torch.float16)
