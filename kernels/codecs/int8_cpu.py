"""Vectors of floats to codes of 8 bits, and back, compiled by Numba, on one thread, without the GIL.

Every step rounds as `kernels.codecs.int8_reference` does, so the results are the same bits: fastmath is off, and LLVM
fuses no multiplication with an addition of its own accord. A vector is worked on as a row of float32 in a small buffer,
so that no copy of a bfloat16 layer in float32 is made. Numba does not know float16: that goes through numpy.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import numpy as np
from numba import njit  # type: ignore[import-untyped]

from kernels.dtypes import BFLOAT16, Array, read_only, to_float32

TOP = 255
"""The largest code."""

LARGEST = 2.0**15
"""What a value is clamped to. No KV is near it, and with it no scale, zero or decoded value leaves float16, whose
largest is 65504."""

SMALLEST_NORMAL = 2.0**-126  # of float32; the inverse of a smaller one may be infinite

_LARGEST = np.float32(LARGEST)
_TOP = np.float32(TOP)


def quantize(x: Array) -> tuple[Array, Array, Array]:
    """``x (rows, cols)``, contiguous  ->  (codes uint8 ``(rows, cols)``, scale, zero), both float16 ``(rows,)``.

    A decoded value, before it is rounded to its dtype, is within half a scale of the value, and float32's rounding.
    NaN counts as zero, and what is too large is clamped to +-32768.
    """
    is_bfloat16 = x.dtype == BFLOAT16
    stored = read_only(x if is_bfloat16 else to_float32(x))
    low, high = np.empty((2, len(x)), np.float32)
    _find_ranges(stored, is_bfloat16, low, high)
    low, high = low + np.float32(0), high + np.float32(0)  # of -0.0 and 0.0 either may be found; 0.0 is kept
    zero = _float16_below(low)
    scale = -_float16_below(-(high - zero.astype(np.float32)) * np.float32(1 / TOP))
    wide = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide >= SMALLEST_NORMAL)
    codes = np.empty(x.shape, np.uint8)
    _encode(stored, is_bfloat16, zero.astype(np.float32), inverse, codes)
    return codes, scale, zero


def dequantize(codes: Array, scale: Array, zero: Array, out: Array) -> None:
    """Write ``zero + code * scale``, computed in float32 and rounded once to its dtype, to ``out``, contiguous.

    The arguments are of the shapes and dtypes that `quantize` returns; any bytes in them give something.
    """
    parts = codes, scale.astype(np.float32), zero.astype(np.float32)
    if out.dtype == BFLOAT16:
        _decode_bfloat16(*parts, out)
    elif out.dtype == np.float32:
        _decode_float32(*parts, out)
    else:
        wide = np.empty(out.shape, np.float32)
        _decode_float32(*parts, wide)
        with np.errstate(over="ignore"):  # arbitrary bytes may overflow
            out[:] = wide


def _float16_below(values: Array) -> Array:
    """The largest float16 that is no larger than the float32."""
    nearest = values.astype(np.float16)
    return np.where(nearest > values, np.nextafter(nearest, np.float16(-np.inf)), nearest)


@njit(nogil=True, cache=True, error_model="numpy")
def _find_ranges(stored: Array, is_bfloat16: bool, low: Array, high: Array) -> None:
    """By an integer that orders as the float32 does: LLVM vectorises the least of integers, but not that of floats."""
    row = np.empty(stored.shape[1], np.float32)
    bits = row.view(np.int32)
    extremes = np.empty(2, np.int32)
    for index in range(len(low)):
        _load(stored[index], is_bfloat16, row)
        least, most = np.int32(0x7FFFFFFF), np.int32(-0x7FFFFFFF)
        for column in range(len(bits)):
            order = np.int32(bits[column] ^ ((bits[column] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            least, most = min(least, order), max(most, order)
        extremes[0] = least ^ ((least >> np.int32(31)) & np.int32(0x7FFFFFFF))
        extremes[1] = most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))
        low[index], high[index] = extremes.view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(stored: Array, is_bfloat16: bool, zero: Array, inverse: Array, codes: Array) -> None:
    row = np.empty(stored.shape[1], np.float32)
    for index in range(len(zero)):
        _load(stored[index], is_bfloat16, row)
        least, per_scale, target = zero[index], inverse[index], codes[index]
        for column in range(len(row)):
            code = np.rint((row[column] - least) * per_scale)
            code = code if code > np.float32(0) else np.float32(0)
            code = code if code < _TOP else _TOP
            target[column] = np.uint8(np.int32(code))


@njit(nogil=True, cache=True, error_model="numpy")
def _load(stored: Array, is_bfloat16: bool, row: Array) -> None:
    """One vector as finite float32s."""
    bits = row.view(np.uint32)
    if is_bfloat16:
        for column in range(len(row)):
            bits[column] = np.uint32(stored[column]) << np.uint32(16)
    else:
        row[:] = stored
    for column in range(len(row)):
        value = row[column]
        value = value if value == value else np.float32(0)  # NaN
        value = value if value > -_LARGEST else -_LARGEST
        row[column] = value if value < _LARGEST else _LARGEST


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_float32(codes: Array, scale: Array, zero: Array, out: Array) -> None:
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            out[row, column] = np.float32(codes[row, column]) * scale[row] + zero[row]


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_bfloat16(codes: Array, scale: Array, zero: Array, out: Array) -> None:
    for row in range(out.shape[0]):
        of_row, least = scale[row], zero[row]
        if np.isfinite(of_row) and np.isfinite(least):
            for column in range(out.shape[1]):
                out[row, column] = _rounded(np.float32(codes[row, column]) * of_row + least)
        else:
            for column in range(out.shape[1]):
                value = np.float32(codes[row, column]) * of_row + least
                # A NaN's fraction must not round up into the next number.
                out[row, column] = _rounded(value) if value == value else np.uint16(0x7FC0)


@njit(nogil=True, cache=True, error_model="numpy")
def _rounded(value: np.float32) -> np.uint16:
    """The bits of the nearest bfloat16, ties to even, as every bfloat16 cast."""
    word = np.float32(value).view(np.uint32)
    return np.uint16((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
