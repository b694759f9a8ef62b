"""CacheGen's symbols of values, values of symbols, and channels' statistics: Numba, on one thread, without the GIL.

A value is its row's base plus ``symbol - limit`` of its channel's steps, rounded once to its dtype. The base is the
channels' means, or, in groups with anchors, the group's anchor. Symbols 0 and ``2 * limit`` are escapes: their values
are taken, in order, from a list that this checks the length of. A token is worked on as a row of float32 in a small
buffer, so that no copy of the layer in float32 is made.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import numpy as np
from numba import njit  # type: ignore[import-untyped]

from kernels.dtypes import BFLOAT16, Array, bits_of, read_only, to_float32
from kernels.errors import CodecError


def quantize(x: Array, step: Array, base: Array, every: int, limit: int) -> tuple[Array, Array]:
    """Of ``x (tokens, channels)``, contiguous: symbols uint8 (coded tokens, channels), and the escaped values' bits.

    ``step`` float32 (channels,), no less than 2**-126; ``base`` and ``every`` as `restore` takes them. A
    symbol is ``clamp(rint((x - base) * (1 / step)), -limit, limit) + limit`` in float32; NaN counts as zero steps.
    Symbols 0 and ``2 * limit`` are escapes: their values' bits come in order, as integers of the width of ``x``.
    """
    bits = read_only(bits_of(x).reshape(x.shape))
    coded = len(x) - (-(-len(x) // every) if every else 0)
    symbols = np.empty((coded, x.shape[1]), np.uint8)
    escapes = np.empty(coded, np.int64)
    inverse = np.float32(1) / step
    if x.dtype == BFLOAT16:
        _quantize_bfloat16(bits, inverse, base, every, np.float32(limit), symbols, escapes)
    else:
        _quantize_float32(read_only(to_float32(x)), inverse, base, every, np.float32(limit), symbols, escapes)
    escaped = np.empty(int(escapes.sum()), bits.dtype)
    if len(escaped):
        _take_escaped(bits, symbols, every, 2 * limit, escapes, escaped)
    return symbols, escaped


def statistics(x: Array, least: float, most: float) -> tuple[Array, Array]:
    """Means and standard deviations, float32 (channels,), of ``x (tokens, channels)``, contiguous.

    Means are kept within -most and most, deviations within least and most. A channel with a NaN or an infinity in it
    gets mean 0 and deviation 1.
    """
    mean, deviation = np.zeros((2, x.shape[1]), np.float32)
    if x.dtype == BFLOAT16:
        _statistics_bfloat16(read_only(x), mean, deviation)
    else:
        _statistics_float32(read_only(to_float32(x)), mean, deviation)
    known = np.isfinite(mean) & np.isfinite(deviation)
    return np.where(known, mean, 0).clip(-most, most), np.where(known, deviation, 1).clip(least, most)


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_bfloat16(
    bits: Array, inverse: Array, base: Array, every: int, limit: np.float32, symbols: Array, escapes: Array
) -> None:
    row = np.empty(bits.shape[1], np.float32)
    coded = 0
    for token in range(bits.shape[0]):
        if every and token % every == 0:
            continue
        _widen(bits[token], row)
        of_row = base[token // every if every else 0]
        escapes[coded] = _quantize_row(row, inverse, of_row, limit, symbols[coded])
        coded += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_float32(
    x: Array, inverse: Array, base: Array, every: int, limit: np.float32, symbols: Array, escapes: Array
) -> None:
    coded = 0
    for token in range(x.shape[0]):
        if every and token % every == 0:
            continue
        of_row = base[token // every if every else 0]
        escapes[coded] = _quantize_row(x[token], inverse, of_row, limit, symbols[coded])
        coded += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _widen(bits: Array, row: Array) -> None:
    """bfloat16 as uint16 to float32."""
    words = row.view(np.uint32)
    for channel in range(row.size):
        words[channel] = np.uint32(bits[channel]) << np.uint32(16)


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_row(row: Array, inverse: Array, base: Array, limit: np.float32, symbols: Array) -> int:
    """One token; returns how many of its values escape. They are counted apart: in the first loop it would take twice
    as long."""
    for channel in range(row.size):
        steps = (row[channel] - base[channel]) * inverse[channel]
        steps = steps if steps == steps else np.float32(0)  # NaN
        steps = steps if steps > -limit else -limit
        steps = steps if steps < limit else limit
        symbols[channel] = np.uint8(np.int32(np.rint(steps) + limit))
    escapes, top = 0, np.uint8(np.int32(limit) * 2)
    for channel in range(row.size):
        escapes += (symbols[channel] == 0) | (symbols[channel] == top)
    return int(escapes)


@njit(nogil=True, cache=True)
def _take_escaped(bits: Array, symbols: Array, every: int, top: int, escapes: Array, escaped: Array) -> None:
    coded, taken = 0, 0
    for token in range(bits.shape[0]):
        if every and token % every == 0:
            continue
        if escapes[coded]:
            for channel in range(bits.shape[1]):
                symbol = symbols[coded, channel]
                if symbol == 0 or symbol == top:
                    escaped[taken] = bits[token, channel]
                    taken += 1
        coded += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _statistics_bfloat16(bits: Array, mean: Array, deviation: Array) -> None:
    row = np.empty(bits.shape[1], np.float32)
    for token in range(bits.shape[0]):
        _widen(bits[token], row)
        _add(row, mean)
    _divide(mean, np.float32(bits.shape[0]))
    for token in range(bits.shape[0]):
        _widen(bits[token], row)
        _add_square(row, mean, deviation)
    _divide(deviation, np.float32(bits.shape[0]))
    _root(deviation)


@njit(nogil=True, cache=True, error_model="numpy")
def _statistics_float32(x: Array, mean: Array, deviation: Array) -> None:
    for token in range(x.shape[0]):
        _add(x[token], mean)
    _divide(mean, np.float32(x.shape[0]))
    for token in range(x.shape[0]):
        _add_square(x[token], mean, deviation)
    _divide(deviation, np.float32(x.shape[0]))
    _root(deviation)


@njit(nogil=True, cache=True, error_model="numpy")
def _add(row: Array, total: Array) -> None:
    for channel in range(row.size):
        total[channel] += row[channel]


@njit(nogil=True, cache=True, error_model="numpy")
def _add_square(row: Array, mean: Array, total: Array) -> None:
    for channel in range(row.size):
        apart = row[channel] - mean[channel]
        total[channel] += apart * apart


@njit(nogil=True, cache=True, error_model="numpy")
def _divide(row: Array, by: np.float32) -> None:
    for channel in range(row.size):
        row[channel] /= by


@njit(nogil=True, cache=True, error_model="numpy")
def _root(row: Array) -> None:
    for channel in range(row.size):
        row[channel] = np.sqrt(row[channel])


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
