"""Entropy coding of byte symbols: interleaved range-ANS with static tables.

To take in symbol s of frequency f, an encoder turns its state x into ``x // f * 4096 + start(s) + x % f``. A decoder
undoes that from the state alone, the last symbol first, so the encoder goes through the symbols backwards. States stay
in [2**16, 2**32) by moving 16-bit words to and from the stream (J. Duda, arXiv 1311.2540, section 3). Sixteen lanes
with a state each take turns in the symbols and share one stream, which needs no marks: whose turn it is to have a word
follows from the states (F. Giesen, arXiv 1402.3392).

The stream, little-endian: each lane's state, ``uint32``, then the words, ``uint16``, in the order of decoding. The last
128 to 143 symbols are the tail, which belongs to lane 0 alone; symbol i before it belongs to lane i % 16. Fewer than
144 symbols are all tail, and their stream has lane 0's state only. The encoder begins with the tail, from state 2**16,
and takes the 15 words that it wrote last back out of the stream: each of the other lanes begins with one of them (or
with 0) as the lower half of its state, and 1 above it. Otherwise each lane would cost two bytes. The decoder insists
on finding all of that as the encoder began.

All functions may be called from any thread, and give up the GIL while they work.
"""

import numpy as np

from kernels.entropy.rans_cpu import LANES, STATE_BYTES, WORD_BYTES, decode_cpu, encode_cpu
from kernels.entropy.symbol_table import PRECISION_BITS, SymbolTable
from kernels.errors import CodecError

__all__ = ["PRECISION_BITS", "CodecError", "SymbolTable", "coded_bound", "decode", "encode"]


def encode(symbols: np.ndarray, table: SymbolTable) -> np.ndarray:
    """Code ``symbols``, ``uint8 (n,)`` contiguous; the stream, ``uint8``, a fresh array of just its length.

    Takes the table's entropy of the symbols and some 20 bytes, or up to 64 where symbols take well below 2 bits each.
    Raises ValueError for a symbol that has no frequency.
    """
    _check_bytes("symbols", symbols)
    coded = np.empty(coded_bound(len(symbols)), dtype=np.uint8)
    return coded[encode_cpu(symbols, table, coded) :].copy()


def decode(coded: memoryview | bytes | bytearray | np.ndarray, table: SymbolTable, out: np.ndarray) -> None:
    """Decode ``len(out)`` symbols into ``out``, ``uint8 (n,)`` contiguous; ``coded`` is a contiguous buffer that holds
    the whole stream and nothing else.

    Raises CodecError for bytes that ``encode`` cannot have made of ``len(out)`` symbols with this table; ``out`` is
    then undefined. That finds most altered streams, not all: a checksum is the caller's. Whatever the bytes, it takes
    time in proportion to ``len(out)`` and no memory but ``out``.
    """
    _check_bytes("out", out)
    if not out.flags.writeable:
        raise ValueError("out must be writable")
    decode_cpu(np.frombuffer(coded, dtype=np.uint8), table, out)


def coded_bound(n: int) -> int:
    """The most bytes that ``encode`` can make of ``n`` symbols: 12 bits each and, for rounding, a little more."""
    return LANES * STATE_BYTES + WORD_BYTES * (3 * n // 4 + (n >> 16) + 1)


def _check_bytes(name: str, array: np.ndarray) -> None:
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous uint8 of one dimension, not {array.dtype} of shape {array.shape}")
