"""Quantization of keys and values: floats in, small integers out, and back.

Three kinds, all over a matrix ``(rows, cols)`` of bfloat16, float16 or float32:

- **groups**: each run of ``group`` columns of a row has its own scale and zero, and evenly spaced codes between its
  least and its largest value. Asymmetric, as in KIVI (arXiv 2402.02750, section 3.2). Which tensor is grouped along
  tokens and which along channels is the caller's choice, by what it passes as rows.
- **vectors**: each row has one scale, its largest absolute value, and the codes number the levels of one codebook,
  spaced unevenly, as NormalFloat is (QLoRA, arXiv 2305.14314, section 3).
- **steps**: each column has one step, which both sides know beforehand, and the symbols count steps from zero. This is
  CacheGen's (SIGCOMM 2024, arXiv 2310.07240, section 5.2): a step is a factor of the channel's standard deviation, and
  the symbols go to an entropy coder.

The codes of groups and vectors are packed as ``kernels.packing`` says; symbols are bytes. NaN counts as zero, and what
is too large is clamped: grouped and vector-wise values to +-32768, steps to ``limit``. CPU tensors take the compiled
version; CUDA tensors take Triton's, except vectors, which there take the reference in plain torch.

Any thread may call these functions. On the CPU a call runs on the calling thread and gives up the GIL while it
computes. Each raises ValueError, before anything is written, when shapes, dtypes or devices do not fit.
"""

import statistics

import torch

from kernels.packing import MAX_BITS, MIN_BITS, packed_bytes
from kernels.quant_cpu import quantize_groups_cpu, quantize_steps_cpu, quantize_vectors_cpu
from kernels.quant_decode_cpu import dequantize_groups_cpu, dequantize_steps_cpu, dequantize_vectors_cpu
from kernels.quant_reference import bits_of, dequantize_vectors_reference, quantize_vectors_reference

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_LIMIT = 127  # a symbol is at most twice the limit, and a byte


def quantize_groups(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x (rows, cols)``  ->  (codes uint8 ``(rows, packed_bytes(cols, bits))``, scale, zero), the two float16 and
    ``(rows, cols / group)``.

    A decoded value, before it is rounded to its dtype, is within half a scale of the value, and float32's rounding.
    ``x`` need not be contiguous; then it is copied. Raises ValueError too when ``group`` does not divide the columns.
    """
    _check_bits(bits)
    _check_values(x)
    if group < 1 or x.shape[1] % group:
        raise ValueError(f"a group of {group} does not divide {x.shape[1]} columns")
    if x.is_cpu:
        return quantize_groups_cpu(x.contiguous(), bits, group)
    from kernels.quant_triton import quantize_groups_triton

    return quantize_groups_triton(x.contiguous(), bits, group)


def dequantize_groups(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, out: torch.Tensor
) -> None:
    """Write ``zero + code * scale``, computed in float32 and rounded once to its dtype, to ``out (rows, cols)``.

    The arguments are what ``quantize_groups`` returned; the group is ``cols`` over the columns of ``scale``.
    """
    _check_bits(bits)
    _check_out(out)
    rows, cols = out.shape
    groups = scale.shape[-1]
    if scale.dim() != 2 or groups < 1 or cols % groups:
        raise ValueError(f"scale {tuple(scale.shape)} does not divide the columns of {tuple(out.shape)} into groups")
    _check_exact("codes", codes, (rows, packed_bytes(cols, bits)), torch.uint8, out)
    _check_exact("scale", scale, (rows, groups), torch.float16, out)
    _check_exact("zero", zero, (rows, groups), torch.float16, out)
    if out.is_cpu:
        dequantize_groups_cpu(codes, scale, zero, bits, out)
        return
    from kernels.quant_triton import dequantize_groups_triton

    dequantize_groups_triton(codes, scale, zero, bits, out)


def quantize_vectors(x: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x (rows, cols)``  ->  (codes uint8 ``(rows, packed_bytes(cols, bits))``, scale float16 ``(rows,)``).

    ``codebook`` float32 ``(2**bits,)``: levels in rising order, within -1 and 1; a code is the number of the level that
    is nearest to value / scale. ``x`` need not be contiguous; then it is copied.
    """
    _check_values(x)
    _check_codebook(codebook, x)
    quantize = quantize_vectors_cpu if x.is_cpu else quantize_vectors_reference
    return quantize(x.contiguous(), codebook)


def dequantize_vectors(codes: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``codebook[code] * scale``, rounded to float32 and then to its dtype, to ``out (rows, cols)``."""
    _check_out(out)
    _check_codebook(codebook, out)
    rows, cols = out.shape
    _check_exact("codes", codes, (rows, packed_bytes(cols, bits_of(codebook))), torch.uint8, out)
    _check_exact("scale", scale, (rows,), torch.float16, out)
    dequantize = dequantize_vectors_cpu if out.is_cpu else dequantize_vectors_reference
    dequantize(codes, scale, codebook, out)


def normal_codebook(bits: int) -> torch.Tensor:
    """NormalFloat's levels, float32 ``(2**bits,)``: quantiles of a normal distribution, scaled to -1..1.

    One more level above zero than below, and zero itself is a level (QLoRA, arXiv 2305.14314, section 3).
    """
    _check_bits(bits)
    count, half = 2**bits, 2 ** (bits - 1)
    outermost = 1 - (1 / (2 * count) + 1 / (2 * (count - 1))) / 2
    quantile = statistics.NormalDist().inv_cdf
    above = [quantile(0.5 + (outermost - 0.5) * index / half) for index in range(1, half + 1)]
    below = [-quantile(0.5 + (outermost - 0.5) * index / (half - 1)) for index in range(half - 1, 0, -1)]
    return torch.tensor([*below, 0.0, *above], dtype=torch.float64).div(above[-1]).float()


def quantize_steps(x: torch.Tensor, step: torch.Tensor, limit: int) -> torch.Tensor:
    """``x (tokens, channels)``, ``step`` float32 ``(channels,)``  ->  symbols uint8 ``(tokens, channels)``.

    A symbol is ``clamp(round(x * (1 / step)), -limit, limit) + limit``, half to even; ``1 <= limit <= 127``. A channel
    whose step is 0 (below 2**-126) has the symbol of zero. ``x`` need not be contiguous; then it is copied.
    Raises ValueError too when a step is negative or not finite.
    """
    _check_limit(limit)
    _check_values(x)
    _check_exact("step", step, (x.shape[1],), torch.float32, x)
    if not bool(((step >= 0) & step.isfinite()).all()):
        raise ValueError("every step must be finite and not negative")
    if x.is_cpu:
        return quantize_steps_cpu(x.contiguous(), step, limit)
    from kernels.quant_triton import quantize_steps_triton

    return quantize_steps_triton(x.contiguous(), step, limit)


def dequantize_steps(symbols: torch.Tensor, step: torch.Tensor, limit: int, out: torch.Tensor) -> None:
    """Write ``(symbol - limit) * step``, rounded to float32 and then to its dtype, to ``out (tokens, channels)``."""
    _check_limit(limit)
    _check_out(out)
    _check_exact("symbols", symbols, tuple(out.shape), torch.uint8, out)
    _check_exact("step", step, (out.shape[1],), torch.float32, out)
    if out.is_cpu:
        dequantize_steps_cpu(symbols, step, limit, out)
        return
    from kernels.quant_triton import dequantize_steps_triton

    dequantize_steps_triton(symbols, step, limit, out)


def warm_up(dtype: torch.dtype) -> None:
    """Compile everything for CPU tensors of ``dtype`` now: the first call in a fresh checkout takes seconds each, later
    processes read the result from Numba's cache on disk. Call it before the engine serves."""
    x = torch.zeros(1, 8, dtype=dtype)
    for bits in (4, 8):  # packed and not
        dequantize_groups(*quantize_groups(x, bits, 8), bits, x)
    codebook = normal_codebook(4)
    dequantize_vectors(*quantize_vectors(x, codebook), codebook, x)
    step = torch.ones(8)
    dequantize_steps(quantize_steps(x, step, 1), step, 1, x)


def _check_bits(bits: int) -> None:
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"codes have {MIN_BITS} to {MAX_BITS} bits, got {bits}")


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"the limit is 1 to {MAX_LIMIT}, got {limit}")


def _check_values(x: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype not in FLOATS or x.numel() == 0:
        raise ValueError(f"need a matrix of bfloat16, float16 or float32, got {tuple(x.shape)} of {x.dtype}")
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"need a CPU or CUDA tensor, got one on {x.device}")


def _check_out(out: torch.Tensor) -> None:
    _check_values(out)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got {tuple(out.shape)} with strides {out.stride()}")


def _check_exact(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, beside: torch.Tensor
) -> None:
    """Refuse what would read outside a tensor: compiled code checks nothing."""
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {shape} of {dtype}, "
            f"got {tuple(tensor.shape)} of {tensor.dtype}, stride {tensor.stride()}"
        )
    if tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device}, the values on {beside.device}")


def _check_codebook(codebook: torch.Tensor, beside: torch.Tensor) -> None:
    levels = codebook.numel()
    if levels not in [2**bits for bits in range(MIN_BITS, MAX_BITS + 1)]:
        raise ValueError(f"a codebook has 4, 8, ... 256 levels, got {levels}")
    _check_exact("codebook", codebook, (levels,), torch.float32, beside)
    rising = codebook.cpu().numpy()  # numpy compares so few numbers in a tenth of torch's time
    if not (rising[1:] > rising[:-1]).all() or rising[0] < -1 or rising[-1] > 1:
        raise ValueError("a codebook's levels must rise, within -1 and 1")
