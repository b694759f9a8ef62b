"""Splitting floats into the 8 bits below their sign and the rest, and joining them, compiled by Numba without the GIL.

For bfloat16 and float32 the 8 bits are the exponent; for float16 the exponent and the first 3 bits of the fraction. The
rest of a 16-bit float is one byte: the sign, then the low 7 bits. The rest of a float32 is three: the sign and the
upper 7 bits of the fraction, then its middle and its low byte, each in a plane of its own.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import numpy as np
from numba import njit  # type: ignore[import-untyped]

from kernels.dtypes import Array, read_only


def rest_bytes(itemsize: int) -> int:
    """Bytes per element that are kept as they are."""
    return itemsize - 1


def split(bits: Array, symbols: Array, rest: Array) -> None:
    """``bits`` uint16 or uint32 (n,)  ->  ``symbols`` uint8 (n,), ``rest`` uint8 (rest_bytes, n)."""
    (_split_2 if bits.itemsize == 2 else _split_4)(read_only(bits), symbols, rest)


def join(symbols: Array, rest: Array, bits: Array) -> None:
    """The inverse of `split`, into ``bits``."""
    (_join_2 if bits.itemsize == 2 else _join_4)(symbols, rest, bits)


@njit(nogil=True, cache=True)
def _split_2(bits: Array, symbols: Array, rest: Array) -> None:
    low = rest[0]
    for i in range(bits.size):
        word = bits[i]
        symbols[i] = np.uint8((word >> np.uint16(7)) & np.uint16(0xFF))
        low[i] = np.uint8(((word >> np.uint16(8)) & np.uint16(0x80)) | (word & np.uint16(0x7F)))


@njit(nogil=True, cache=True)
def _join_2(symbols: Array, rest: Array, bits: Array) -> None:
    low = rest[0]
    for i in range(bits.size):
        part = np.uint16(low[i])
        bits[i] = (
            ((part & np.uint16(0x80)) << np.uint16(8))
            | (np.uint16(symbols[i]) << np.uint16(7))
            | (part & np.uint16(0x7F))
        )


@njit(nogil=True, cache=True)
def _split_4(bits: Array, symbols: Array, rest: Array) -> None:
    upper, middle, low = rest[0], rest[1], rest[2]
    for i in range(bits.size):
        word = bits[i]
        symbols[i] = np.uint8((word >> np.uint32(23)) & np.uint32(0xFF))
        upper[i] = np.uint8(((word >> np.uint32(24)) & np.uint32(0x80)) | ((word >> np.uint32(16)) & np.uint32(0x7F)))
        middle[i] = np.uint8((word >> np.uint32(8)) & np.uint32(0xFF))
        low[i] = np.uint8(word & np.uint32(0xFF))


@njit(nogil=True, cache=True)
def _join_4(symbols: Array, rest: Array, bits: Array) -> None:
    upper, middle, low = rest[0], rest[1], rest[2]
    for i in range(bits.size):
        part = np.uint32(upper[i])
        bits[i] = (
            ((part & np.uint32(0x80)) << np.uint32(24))
            | (np.uint32(symbols[i]) << np.uint32(23))
            | ((part & np.uint32(0x7F)) << np.uint32(16))
            | (np.uint32(middle[i]) << np.uint32(8))
            | np.uint32(low[i])
        )
