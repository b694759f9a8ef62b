"""From CacheGen's symbols back to values, compiled by Numba, on one thread, without the GIL.

A value is its row's base plus ``symbol - limit`` of its channel's steps, rounded once to its dtype. The base is the
channels' means, or, in groups with anchors, the group's anchor. Symbols 0 and ``2 * limit`` are escapes: their values
are taken, in order, from a list that this checks the length of.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import numpy as np
from numba import njit  # type: ignore[import-untyped]

from kernels.dtypes import BFLOAT16, Array
from kernels.errors import CodecError


def restore(symbols: Array, limit: int, step: Array, base: Array, every: int, escaped: Array, out: Array) -> None:
    """Fill ``out (tokens, channels)``, contiguous.

    ``symbols`` uint8 (coded tokens, channels), ``step`` float32 (channels,), ``escaped`` float32. ``every`` 0: all
    tokens are coded, and ``base`` float32 (1, channels) is for all. Otherwise each ``every``-th token is an anchor, is
    not among the coded ones, and is its own and the following tokens' row of ``base``.

    Raises CodecError when there are more or fewer escapes than escaped values.
    """
    if out.dtype == BFLOAT16:
        used: int = _restore_bfloat16(symbols, limit, step, base, every, escaped, out)
    elif out.dtype == np.float32:
        used = _restore_float32(symbols, limit, step, base, every, escaped, out)
    else:
        wide = np.empty(out.shape, np.float32)
        used = _restore_float32(symbols, limit, step, base, every, escaped, wide)
        with np.errstate(over="ignore"):  # arbitrary bytes may overflow
            out[:] = wide
    if used != len(escaped):
        raise CodecError(f"{len(escaped)} escaped values for {'fewer' if used >= 0 else 'more'} escapes")


@njit(nogil=True, cache=True)
def _restore_bfloat16(
    symbols: Array, limit: int, step: Array, base: Array, every: int, escaped: Array, out: Array
) -> int:
    row = np.empty(out.shape[1], np.float32)
    bits = row.view(np.uint32)
    coded, used = 0, 0
    for token in range(out.shape[0]):
        if every and token % every == 0:
            _copy(base[token // every], row)
        else:
            used = _row(symbols[coded], limit, step, base[token // every if every else 0], escaped, used, row)
            if used < 0:
                return -1
            coded += 1
        target = out[token]
        for channel in range(row.size):
            word = bits[channel]
            # To nearest, ties to even, as every bfloat16 cast; a NaN's fraction must not round up into the next number.
            rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            target[channel] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)
    return int(used)


@njit(nogil=True, cache=True)
def _restore_float32(
    symbols: Array, limit: int, step: Array, base: Array, every: int, escaped: Array, out: Array
) -> int:
    coded, used = 0, 0
    for token in range(out.shape[0]):
        if every and token % every == 0:
            _copy(base[token // every], out[token])
        else:
            used = _row(symbols[coded], limit, step, base[token // every if every else 0], escaped, used, out[token])
            if used < 0:
                return -1
            coded += 1
    return int(used)


@njit(nogil=True, cache=True)
def _copy(source: Array, row: Array) -> None:
    """Copy in a loop: for an assignment to a slice Numba compiles the words of an error, for seconds."""
    for channel in range(row.size):
        row[channel] = source[channel]


@njit(nogil=True, cache=True)
def _row(symbols: Array, limit: int, step: Array, base: Array, escaped: Array, used: int, row: Array) -> int:
    """One token; returns how many escaped values are used up to its end, -1 when there are too few."""
    escapes = 0
    top = 2 * limit
    for channel in range(row.size):
        symbol = symbols[channel]
        row[channel] = base[channel] + np.float32(np.int32(symbol) - np.int32(limit)) * step[channel]
        escapes += (symbol == 0) | (symbol == top)
    if escapes:
        if used + escapes > escaped.size:
            return -1
        for channel in range(row.size):
            symbol = symbols[channel]
            if symbol == 0 or symbol == top:
                row[channel] = escaped[used]
                used += 1
    return int(used)
