"""``SymbolTable``: how many of the 4096 slots of a range-ANS state each byte symbol owns.

The table is static: profiled once and shared, or built for one section from its own counts. Encoder and decoder must
hold the same one.
"""

# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numba import njit  # type: ignore[import-untyped]

PRECISION_BITS = 12
SLOTS = 1 << PRECISION_BITS

UNCODABLE = 1 << 31  # in an encoding entry: the table gives this symbol no slot

_TWO_BYTES = 0x80  # in a serialised frequency: its upper six bits follow


@dataclass(frozen=True, eq=False)
class SymbolTable:
    """Frequencies of the symbols 0..len-1, ``uint16``, 1 to 256 of them; they sum to 4096.

    A symbol of frequency 0, or beyond the last, cannot be coded. Immutable; any thread may use it.
    """

    frequencies: np.ndarray

    def __post_init__(self) -> None:
        given = self.frequencies
        if given.dtype != np.uint16 or given.ndim != 1 or not 1 <= len(given) <= 256:
            raise ValueError(f"a symbol table has 1 to 256 frequencies, uint16, not {given.dtype} {given.shape}")
        if given.sum(dtype=np.int64) != SLOTS:
            raise ValueError(f"the frequencies of a symbol table must sum to {SLOTS}")
        frequencies = given.copy()
        frequencies.setflags(write=False)
        object.__setattr__(self, "frequencies", frequencies)

    @classmethod
    def from_counts(cls, counts: np.ndarray, strict: bool = False) -> "SymbolTable":
        """The table that codes ``counts[symbol]`` occurrences of each symbol in about the fewest bits.

        Every symbol gets a slot, whether or not it occurred, so that the table serves other data too; with ``strict``
        those that did not occur get none. Each frequency is the symbol's share, rounded; what rounding leaves over or
        lacks goes where it costs least. Raises ValueError without counts, or for a negative one.
        """
        counts = np.asarray(counts, dtype=np.float64)
        if counts.ndim != 1 or not 1 <= len(counts) <= 256 or not np.all((counts >= 0) & np.isfinite(counts)):
            raise ValueError("a symbol table needs 1 to 256 counts, none of them negative")
        total = counts.sum()
        if total == 0:
            if strict:
                raise ValueError("a strict symbol table needs at least one symbol that occurs")
            counts = np.ones_like(counts)
            total = counts.sum()
        coded = counts > 0 if strict else np.ones(len(counts), dtype=bool)
        # Symbols whose share is below one slot get one; the others share the rest, which may push more of them below.
        scaled = counts * (SLOTS / total)
        small = coded & (scaled < 1)
        while True:
            large = coded & ~small
            scaled = counts * ((SLOTS - np.count_nonzero(small)) / counts[large].sum())
            below = large & (scaled < 1)
            if not below.any():
                break
            small |= below
        # A symbol is worth its next slot when its share exceeds the logarithmic mean of the two frequencies.
        floors = np.maximum(np.floor(scaled), 1)
        frequencies = np.where(large, floors + (scaled > 1 / np.log1p(1 / floors)), small).astype(np.int64)
        left = SLOTS - int(frequencies.sum())
        # What is left over or lacking is less than a slot per symbol; a frequent one may well give or take two.
        for _ in range(left):
            gain = np.where(coded, counts * np.log1p(1 / np.maximum(frequencies, 1)), -1.0)
            frequencies[np.argmax(gain)] += 1
        for _ in range(-left):
            loss = np.where(frequencies > 1, counts * np.log1p(1 / np.maximum(frequencies - 1, 1)), np.inf)
            frequencies[np.argmin(loss)] -= 1
        return cls(frequencies.astype(np.uint16))

    def entropy_bits(self, counts: np.ndarray) -> float:
        """Bits that ideal coding of ``counts[symbol]`` occurrences takes with this table; inf if one has no slot."""
        counts = np.asarray(counts, dtype=np.float64)
        occurring = np.flatnonzero(counts)
        if len(occurring) == 0:
            return 0.0
        if occurring[-1] >= len(self.frequencies) or not self.frequencies[occurring].all():
            return float("inf")
        return float(counts[occurring] @ (PRECISION_BITS - np.log2(self.frequencies[occurring])))

    def to_bytes(self) -> bytes:
        """The table in few bytes, and always the same ones: the number of symbols less one; then, per symbol, its
        frequency as one byte below 128 or as two (the lower seven bits first). A run of zeros is a zero and the run's
        length less one."""
        coded = bytearray([len(self.frequencies) - 1])
        for frequency, run in itertools.groupby(self.frequencies.tolist()):
            length = sum(1 for _ in run)
            if frequency == 0:
                coded += bytes([0, length - 1])
            elif frequency < _TWO_BYTES:
                coded += bytes([frequency]) * length
            else:
                coded += bytes([frequency % _TWO_BYTES | _TWO_BYTES, frequency >> 7]) * length
        return bytes(coded)

    @classmethod
    def from_bytes(cls, coded: bytes | bytearray | memoryview) -> "SymbolTable":
        """Read a table that ``to_bytes`` wrote. Raises ValueError for anything that it could not have written."""
        frequencies = np.zeros(256, dtype=np.uint16)
        count = _parse(np.frombuffer(coded, dtype=np.uint8).astype(np.int64), frequencies) if len(coded) else 0
        if count == 0:
            raise ValueError("not a serialised symbol table")
        return cls(frequencies[:count])

    @functools.cached_property
    def decoding_entries(self) -> np.ndarray:
        """Per slot, ``uint32 (4096,)``: symbol | frequency less one << 8 | slot less the symbol's first slot << 20."""
        entries = np.empty(SLOTS, dtype=np.uint32)
        _fill_decoding_entries(self.frequencies, entries)
        return entries

    @functools.cached_property
    def encoding_entries(self) -> np.ndarray:
        """Per symbol, ``uint32 (256,)``: first slot | frequency << 12. An uncodable one has ``UNCODABLE`` and all the
        slots, so that an encoder which meets it goes on without harm, and looks for the mark at the end."""
        frequencies = self.frequencies.astype(np.uint32)
        entries = np.full(256, UNCODABLE | SLOTS << PRECISION_BITS, dtype=np.uint32)
        entries[: len(frequencies)] = np.where(
            frequencies, np.cumsum(frequencies) - frequencies | frequencies << PRECISION_BITS, entries[-1]
        )
        return entries


@njit(nogil=True, cache=True)
def _fill_decoding_entries(frequencies: np.ndarray, entries: np.ndarray) -> None:
    slot = 0
    for symbol in range(len(frequencies)):
        for offset in range(frequencies[symbol]):
            entries[slot] = symbol | (np.int64(frequencies[symbol]) - 1) << 8 | offset << 20
            slot += 1


@njit(nogil=True, cache=True)
def _parse(coded: np.ndarray, frequencies: np.ndarray) -> int:
    """Read a serialised table into ``frequencies``, zeros before; its number of symbols, or 0 if it is malformed."""
    count = total = 0
    position = 1
    after_zeros = False
    while position < len(coded):
        first = coded[position]
        zeros = first == 0
        if zeros or first >= _TWO_BYTES:
            if position + 1 == len(coded):
                return 0
            second = coded[position + 1]
            position += 2
        else:
            second = 0
            position += 1
        if zeros:
            if after_zeros:
                return 0
            count += second + 1
        else:
            if first >= _TWO_BYTES and second == 0:
                return 0
            frequency = first % _TWO_BYTES | second << 7
            total += frequency
            if count < 256:
                frequencies[count] = frequency
            count += 1
        after_zeros = zeros
        if count > 256 or total > SLOTS:
            return 0
    return count if total == SLOTS and count == coded[0] + 1 else 0
