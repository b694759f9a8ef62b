"""The range-ANS coder of ``kernels.entropy.rans`` in plain Python: what the fast one is held to, byte by byte."""

import itertools
import struct

import numpy as np

from kernels.entropy.symbol_table import PRECISION_BITS, SLOTS, SymbolTable
from kernels.errors import CodecError

LANES = 16
TAIL = 128
LOWEST = 1 << 16  # the least value of a state, and the one that lane 0 begins with


def encode(symbols: np.ndarray, table: SymbolTable) -> np.ndarray:
    """``kernels.entropy.rans.encode``."""
    frequencies: list[int] = table.frequencies.tolist()
    starts = list(itertools.accumulate(frequencies, initial=0))
    words: list[int] = []  # in the order of encoding

    def push(state: int, symbol: int) -> int:
        if symbol >= len(frequencies) or frequencies[symbol] == 0:
            raise ValueError(f"symbol {symbol} has no frequency in the table")
        frequency = frequencies[symbol]
        if state >= frequency << (32 - PRECISION_BITS):
            words.append(state & 0xFFFF)
            state >>= 16
        return state // frequency * SLOTS + starts[symbol] + state % frequency

    values = symbols.tolist()
    groups = max(0, len(values) - TAIL) // LANES
    states = [LOWEST]
    for symbol in reversed(values[groups * LANES :]):
        states[0] = push(states[0], symbol)
    if groups:
        states += [LOWEST | (words.pop() if words else 0) for _ in range(1, LANES)]
        for index in reversed(range(groups * LANES)):
            states[index % LANES] = push(states[index % LANES], values[index])
    coded = struct.pack(f"<{len(states)}I{len(words)}H", *states, *reversed(words))
    return np.frombuffer(coded, dtype=np.uint8)


def decode(coded: bytes, table: SymbolTable, out: np.ndarray) -> None:
    """``kernels.entropy.rans.decode``."""
    frequencies: list[int] = table.frequencies.tolist()
    slots = [(symbol, offset) for symbol, frequency in enumerate(frequencies) for offset in range(frequency)]
    groups = max(0, len(out) - TAIL) // LANES
    lanes = LANES if groups else 1
    if len(coded) < 4 * lanes or len(coded) % 2:
        raise CodecError("not a stream")
    states = list(struct.unpack_from(f"<{lanes}I", coded))
    if min(states) < LOWEST:
        raise CodecError("a state is too small")
    words = list(reversed(struct.unpack_from(f"<{(len(coded) - 4 * lanes) // 2}H", coded, 4 * lanes)))

    def pop(state: int, source: list[int]) -> tuple[int, int]:
        symbol, offset = slots[state % SLOTS]
        state = state // SLOTS * frequencies[symbol] + offset
        if state < LOWEST:
            if not source:
                raise CodecError("truncated")
            state = state << 16 | source.pop()
        return symbol, state

    for index in range(groups * LANES):
        out[index], states[index % LANES] = pop(states[index % LANES], words)
    if any(state >= 2 * LOWEST for state in states[1:]):
        raise CodecError("a lane did not begin there")
    carried = [state - LOWEST for state in reversed(states[1:])]
    state = states[0]
    for index in range(groups * LANES, len(out)):
        out[index], state = pop(state, carried or words)
    if state != LOWEST or words or any(carried):
        raise CodecError("inconsistent or overlong")
