"""The decoder on bytes that no encoder wrote. A read or a write past the end of its buffers is a segmentation fault:
both end where a page without access begins."""

import ctypes
import mmap
import random

import numpy as np

from kernels.entropy import rans, rans_cpu, rans_reference
from kernels.entropy.rans import SymbolTable
from kernels.errors import CodecError
from tests.sizes import CODED_INPUTS

NO_SYMBOL = 255  # of none of the tables: what has not been written


def fenced(size: int) -> np.ndarray:
    """Zeros, at least ``size`` bytes, before a page that may be neither read nor written."""
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(memory.ctypes.data + size, mmap.PAGESIZE, 0) == 0
    return memory[:size]


def streams(rng: np.random.Generator) -> list[tuple[SymbolTable, int, bytes]]:
    found = []
    for deviation in (0.0, 0.3, 1.5, 20.0):
        every = np.clip(np.rint(rng.normal(100, deviation, 20_000)), 0, 200).astype(np.uint8)
        table = SymbolTable.from_counts(np.bincount(every), strict=True)
        found += [(table, n, rans.encode(every[:n], table).tobytes()) for n in (0, 1, 40, 143, 144, 160, 200, 420)]
    return found


def mutated(rng: random.Random, coded: bytes, other: bytes) -> bytes:
    """One to three changes: flip a bit, set a byte, cut off an end, extend, splice, repeat, all at random."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, upto = sorted((rng.randrange(len(coded) + 1), rng.randrange(len(coded) + 1)))
        kind = rng.randrange(8)
        if kind <= 1 and at < len(coded):
            coded = coded[:at] + bytes([coded[at] ^ 1 << rng.randrange(8)]) + coded[at + 1 :]
        elif kind == 2 and at < len(coded):
            coded = coded[:at] + rng.choice((b"\0", b"\xff", rng.randbytes(1))) + coded[at + 1 :]
        elif kind == 3:
            coded = coded[:at] if rng.random() < 0.5 else coded[at:]
        elif kind == 4:
            coded += rng.choice((bytes(2), rng.randbytes(rng.randrange(1, 40)), other[:upto]))
        elif kind == 5:
            coded = coded[:at] + other[at % (len(other) + 1) :]
        elif kind == 6:
            coded = coded[:at] + coded[upto:] + coded[at:upto]
        elif kind == 7:
            coded = rng.randbytes(rng.randrange(len(coded) + 64))
    return coded


def test_any_bytes_are_an_error_or_as_many_symbols_as_were_asked_for():
    rng = random.Random(20)
    cases = streams(np.random.default_rng(20))
    source, target = fenced(4096), fenced(4096)
    decoded = judged = 0
    for step in range(CODED_INPUTS):
        table, count, coded = cases[step % len(cases)]
        other_table, other_count, other = rng.choice(cases)
        coded = mutated(rng, coded, other)
        if rng.random() < 0.05:
            table, count = rng.choice(((table, other_count), (other_table, count)))
        begin = len(source) - len(coded)
        source[begin:] = np.frombuffer(coded, dtype=np.uint8)
        out = target[len(target) - count :]
        out[:] = NO_SYMBOL
        try:
            rans_cpu.decode_cpu(source[begin:], table, out, vectors=step % 3 != 0)
        except CodecError:
            fine = False
        else:
            fine = True
            decoded += 1
            assert NO_SYMBOL not in out.tobytes()
        if fine or step % 50 == 0:
            judged += 1
            expected = np.empty(count, dtype=np.uint8)
            try:
                rans_reference.decode(coded, table, expected)
            except CodecError:
                assert not fine
            else:
                assert fine
                np.testing.assert_array_equal(out, expected)
    assert decoded < CODED_INPUTS // 20  # changes that cancel out, or hit an unused bit: nearly all others are found
    assert judged > CODED_INPUTS // 50
