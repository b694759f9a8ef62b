"""``lossless``: every bit comes back. The 8 bits below the sign are entropy-coded, the others are kept as they are.

Trained keys and values fill few binades, so the exponents carry about 2.6 of their 8 bits; signs and fractions carry
all of theirs. The table of exponents is made for each K and each V of a section and travels in it: some 40 bytes
against 32 KiB of symbols. Tables by channel, or exponents counted from each channel's own, were measured and left out:
on the demo model they save 2 % of the exponents' bits, .3 % of the whole (docs/measured/compression.md).

For bfloat16 and float32 these 8 bits are the exponent; for float16 the exponent and the first 3 bits of the fraction.
The rest of a 16-bit float is one byte: the sign, then the low 7 bits. The rest of a float32 is three: the sign and the
upper 7 bits of the fraction, then its middle and its low byte, each in a plane of its own. Numba compiles the loops
over them, on one thread, without the GIL.

A section is K's half, then V's; of latents there is one half. Each is ``form u8, table bytes u16, coded bytes u32``,
the table, the coded symbols, the rest; or, where that would not be shorter, form 0 and the elements as they are.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import struct
from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped]

from kernels.codecs.base import Bytes, SectionReader, Shape, bytes_of, check_layer, raw_bytes
from kernels.dtypes import Array, bits_of, read_only
from kernels.entropy import rans
from kernels.errors import CodecError

_HALF = struct.Struct("<BHI")
_RAW, _CODED = 0, 1


class LosslessCodec:
    """See the module. Stateless; any thread."""

    name = "lossless"
    level = 0
    lossy = False
    profile = b""
    generic = False

    def encode(self, layer: int, kv: Array) -> Bytes:
        """See `Codec`."""
        check_layer(kv, latents=True)
        parts = [part for half in kv for part in _encode_half(bits_of(half))]
        return np.concatenate(parts)

    def decode(self, layer: int, coded: bytes | memoryview | Bytes, out: Array) -> None:
        """See `Codec`."""
        check_layer(out, latents=True)
        section = SectionReader(coded)
        for half in out:
            _decode_half(section, bits_of(half))
        section.end()

    def bound(self, shape: Shape, dtype: np.dtype[Any]) -> int:
        """See `Codec`."""
        return raw_bytes(shape, dtype) + shape[0] * _HALF.size


def _encode_half(bits: Array) -> list[Bytes]:
    symbols = np.empty(bits.size, np.uint8)
    rest = np.empty((rest_bytes(bits.itemsize), bits.size), np.uint8)
    split(bits, symbols, rest)
    table = rans.SymbolTable.from_counts(np.bincount(symbols), strict=True)
    table_bytes = table.to_bytes()
    coded = rans.encode(symbols, table)
    if len(table_bytes) + len(coded) >= bits.size:
        return [_header(_RAW, 0, 0), bytes_of(bits)]
    return [
        _header(_CODED, len(table_bytes), len(coded)),
        np.frombuffer(table_bytes, np.uint8),
        coded,
        bytes_of(rest),
    ]


def _decode_half(section: SectionReader, bits: Array) -> None:
    form, table_bytes, coded_bytes = section.fields(_HALF)
    if form == _RAW and table_bytes == coded_bytes == 0:
        bytes_of(bits)[:] = section.take(bits.nbytes)
        return
    if form != _CODED or table_bytes + coded_bytes >= bits.size:
        raise CodecError(f"a half of form {form} with {coded_bytes} coded bytes for {bits.size} elements")
    try:
        table = rans.SymbolTable.from_bytes(section.take(table_bytes).tobytes())
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(f"the table of exponents is damaged: {error}") from None
    coded = section.take(coded_bytes)
    rest = section.take(rest_bytes(bits.itemsize) * bits.size).reshape(-1, bits.size)
    symbols = np.empty(bits.size, np.uint8)
    rans.decode(coded, table, symbols)
    join(symbols, rest, bits)


def _header(form: int, table_bytes: int, coded_bytes: int) -> Bytes:
    return np.frombuffer(_HALF.pack(form, table_bytes, coded_bytes), np.uint8)


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
