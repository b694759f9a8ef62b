"""The quantizers of ``kernels.quant`` for the CPU, compiled by Numba, on one thread, without the GIL.

Decoding is in ``quant_decode_cpu.py``.

Every step rounds as ``quant_reference.py`` does, so the results are the same bits: fastmath is off, and LLVM fuses no
multiplication with an addition of its own accord. The inner loops are of a fixed length where they can be, because LLVM
otherwise leaves what is shorter than four vectors, such as a group of 32, to a scalar loop.

Numba knows neither bfloat16 nor float16: compiled code sees bfloat16 as uint16 and float16 as int16, and ``_widen``
turns them into float32.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from kernels import quant_reference as reference
from kernels.packing_cpu import pack_cpu

CHUNK = 32  # columns in an inner loop of fixed length
LARGEST = np.float32(reference.LARGEST)
SMALLEST_NORMAL = np.float32(reference.SMALLEST_NORMAL)


def quantize_groups_cpu(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``kernels.quant.quantize_groups``; the arguments are already checked, and contiguous CPU tensors."""
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    scale, zero = torch.empty(2, rows, cols // group, dtype=torch.float16)
    _quantize_groups(_array(x), group, np.float32(2**bits - 1), codes.numpy(), _array(scale), _array(zero))
    return pack_cpu(codes, bits), scale, zero


def quantize_vectors_cpu(x: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.quant.quantize_vectors``; as above."""
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scale = torch.empty(len(x), dtype=torch.float16)
    _quantize_vectors(_array(x), reference.boundaries(codebook).numpy(), codes.numpy(), _array(scale))
    return pack_cpu(codes, reference.bits_of(codebook)), scale


def quantize_steps_cpu(x: torch.Tensor, step: torch.Tensor, limit: int) -> torch.Tensor:
    """``kernels.quant.quantize_steps``; as above."""
    symbols = torch.empty(x.shape, dtype=torch.uint8)
    _quantize_steps(_array(x), reference.inverse(step).numpy(), np.float32(limit), symbols.numpy())
    return symbols


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory, with the dtype that tells compiled code its format."""
    if tensor.dtype is torch.float32:
        return tensor.numpy()
    if tensor.dtype is torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.view(torch.uint16).numpy()


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_groups(
    x: np.ndarray, group: int, top: np.float32, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray
) -> None:
    low, high, inverse = np.empty((3, scale.shape[1]), dtype=np.float32)
    for row in range(x.shape[0]):
        _find_ranges(x[row], group, low, high)
        _fit_groups(low, high, top, scale[row], zero[row], inverse)
        _encode_groups(x[row], group, low, inverse, top, codes[row])


@njit(nogil=True, cache=True, error_model="numpy")
def _find_ranges(x: np.ndarray, group: int, low: np.ndarray, high: np.ndarray) -> None:
    for index in range(len(low)):
        values = x[index * group : (index + 1) * group]
        least, most = np.int32(0x7FFFFFFF), np.int32(-0x7FFFFFFF)
        for column in range(group):
            order = _order(_finite(_widen(values[column])))
            least, most = min(least, order), max(most, order)
        low[index], high[index] = _order_value(least), _order_value(most)


@njit(nogil=True, cache=True, error_model="numpy")
def _fit_groups(
    low: np.ndarray, high: np.ndarray, top: np.float32, scale: np.ndarray, zero: np.ndarray, inverse: np.ndarray
) -> None:
    """``quant_reference.group_parameters``; leaves zero as a float32 in ``low``."""
    for index in range(len(low)):
        zero[index] = _float16_below(low[index] + np.float32(0.0))
        low[index] = _widen(zero[index])
        scale[index] = _float16_above((high[index] - low[index]) * (np.float32(1.0) / top))
        inverse[index] = _inverse(_widen(scale[index]))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_groups(
    x: np.ndarray, group: int, zero: np.ndarray, inverse: np.ndarray, top: np.float32, codes: np.ndarray
) -> None:
    whole = group - group % CHUNK
    for index in range(len(zero)):
        values, target = x[index * group : (index + 1) * group], codes[index * group : (index + 1) * group]
        for start in range(0, whole, CHUNK):
            for column in range(start, start + CHUNK):
                target[column] = _group_code(values[column], zero[index], inverse[index], top)
        for column in range(whole, group):
            target[column] = _group_code(values[column], zero[index], inverse[index], top)


@njit(nogil=True, cache=True, error_model="numpy")
def _group_code(stored: Any, zero: np.float32, inverse: np.float32, top: np.float32) -> np.uint8:
    code = (_finite(_widen(stored)) - zero) * inverse
    return np.uint8(np.int32(_clamp(np.rint(code), np.float32(0.0), top)))


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_vectors(x: np.ndarray, boundaries: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> None:
    scaled = np.empty(x.shape[1], dtype=np.float32)
    for row in range(x.shape[0]):
        values, target = x[row], codes[row]
        most = np.int32(0)
        for column in range(len(target)):
            scaled[column] = _finite(_widen(values[column]))
            most = max(most, _order(abs(scaled[column])))
        scale[row] = _float16_above(_order_value(most))
        inverse = _inverse(_widen(scale[row]))
        for column in range(len(target)):
            scaled[column] *= inverse
            target[column] = 0
        _count_below(scaled, boundaries, target)


@njit(nogil=True, cache=True, error_model="numpy")
def _count_below(values: np.ndarray, boundaries: np.ndarray, counts: np.ndarray) -> None:
    """How many boundaries, one less than a power of two and rising, lie below each value; ``counts`` starts as zeros.

    A binary search, one step of it for all values before the next, so that no step waits for the one before. It goes
    by the sign of a difference, because LLVM makes a branch of a comparison, and every second one is mispredicted.
    """
    half = np.int32((len(boundaries) + 1) // 2)
    while half:
        for column in range(len(counts)):
            count = counts[column]
            difference = np.float32(boundaries[count + np.uint64(half - 1)] - values[column])
            counts[column] = count + np.uint8((difference.view(np.int32) >> np.int32(31)) & half)
        half = np.int32(half >> 1)


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_steps(x: np.ndarray, inverse: np.ndarray, limit: np.float32, symbols: np.ndarray) -> None:
    for row in range(x.shape[0]):
        values, target = x[row], symbols[row]
        for column in range(len(target)):
            steps = _widen(values[column]) * inverse[column]
            steps = steps if steps == steps else np.float32(0.0)  # NaN
            target[column] = np.uint8(np.int32(np.rint(_clamp(steps, -limit, limit)) + limit))


@njit(nogil=True, cache=True, error_model="numpy")
def _order(value: np.float32) -> np.int32:
    """An integer that orders as the float32 does: LLVM vectorises the least of integers, but not that of floats."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, cache=True, error_model="numpy")
def _order_value(order: np.int32) -> np.float32:
    """The reverse of ``_order``."""
    bits = np.int32(order ^ ((order >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return bits.view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _finite(value: np.float32) -> np.float32:
    number = value if value == value else np.float32(0.0)  # NaN
    clamped: np.float32 = _clamp(number, np.float32(-LARGEST), LARGEST)
    return clamped


@njit(nogil=True, cache=True, error_model="numpy")
def _clamp(value: np.float32, low: np.float32, high: np.float32) -> np.float32:
    raised = value if value > low else low
    return raised if raised < high else high


@njit(nogil=True, cache=True, error_model="numpy")
def _inverse(scale: np.float32) -> np.float32:
    inverse = np.float32(1.0) / scale
    return inverse if scale >= SMALLEST_NORMAL else np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _float16_above(value: np.float32) -> np.int16:
    return np.int16(_float16_below(-value) ^ np.int16(-0x8000))


@njit(nogil=True, cache=True, error_model="numpy")
def _float16_below(value: np.float32) -> np.int16:
    """The bits of the largest float16 that is no larger than the float32."""
    bits = _to_float16(value)
    next_below = np.int16(bits - 1 if bits > 0 else bits + 1)
    next_below = next_below if bits & np.int16(0x7FFF) else np.int16(-0x7FFF)
    return bits if _widen(bits) <= value else next_below


@intrinsic
def _widen(typing_context: Any, stored: Any) -> Any:
    """The float32 of a stored element, exactly."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        (value,) = arguments
        if stored == types.uint16:
            bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.IntType(32)(16))
            return builder.bitcast(bits, ir.FloatType())
        if stored == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        return value

    return types.float32(stored), codegen


@intrinsic
def _to_float16(typing_context: Any, value: Any) -> Any:
    """The bits of the float16 that is nearest to a float32: rounded half to even."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), codegen
