"""The range-ANS coder of ``kernels.entropy.rans``, compiled by Numba, on one thread, without the GIL.

A state fits 32 bits, so the sixteen lanes are one AVX-512 register: a group of sixteen symbols takes one gather from
the table and one expand (or compress), which deals the stream's words out to the lanes that want one. Numba has no
words for these: they are LLVM IR, and left out where the processor lacks AVX-512. There, and for the last groups of a
stream and the tail, the lanes take their turns in a loop.

Nothing in a stream can lead the decoder astray. Its table has an entry for whatever a state's lower 12 bits are; what
it makes of a state of 32 bits is one again; it ends after as many steps as there are symbols. A group is decoded
without looking for the end of the stream while every lane's word is there, and with a look before each word after that.

Memory is given by address, as 64-bit integers, so that the same compiled code reads read-only buffers. It all stays in
this file, constants too, because Numba's cache on disk notices edits of the compiled function's own file only.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from kernels.entropy.symbol_table import SymbolTable
from kernels.errors import CodecError

LANES = 16
TAIL = 128  # fewest symbols in the tail; at 2 bits each it fills the 15 words that the other lanes can carry
LOWEST = 1 << 16  # the least value of a state, and the one that lane 0 begins with
STATE_BYTES = 4
WORD_BITS = 16
WORD_BYTES = 2
PRECISION_BITS = 12  # these three as in kernels.entropy.symbol_table
SLOTS = 1 << PRECISION_BITS
UNCODABLE = 1 << 31

_DONE, _TRUNCATED, _OVERLONG, _INCONSISTENT = range(4)
_COMPLAINTS = {
    _TRUNCATED: "the stream ends before its last symbol",
    _OVERLONG: "the stream goes on after its last symbol",
    _INCONSISTENT: "the stream was not made of this many symbols with this table",
}


def encode_cpu(symbols: np.ndarray, table: SymbolTable, coded: np.ndarray, vectors: bool = True) -> int:
    """Write ``kernels.entropy.rans.encode`` to the end of ``coded``, of ``coded_bound`` bytes; the index where it
    begins.

    ``vectors=False`` does without AVX-512. The arguments are already checked, except the symbols themselves.
    """
    states = np.empty(LANES, dtype=np.uint32)
    entries = table.encoding_entries
    begin = coded.ctypes.data
    position = _encode(
        symbols.ctypes.data, len(symbols), entries.ctypes.data, states.ctypes.data, begin + len(coded), vectors
    )
    if position == 0:
        raise ValueError("a symbol has no frequency in the table")
    return int(position - begin)


def decode_cpu(coded: np.ndarray, table: SymbolTable, out: np.ndarray, vectors: bool = True) -> None:
    """``kernels.entropy.rans.decode`` of ``uint8`` arrays; ``vectors=False`` does without AVX-512."""
    states = np.empty(LANES, dtype=np.uint32)
    entries = table.decoding_entries
    begin = coded.ctypes.data
    outcome = _decode(
        begin, begin + len(coded), entries.ctypes.data, states.ctypes.data, out.ctypes.data, len(out), vectors
    )
    if outcome != _DONE:
        raise CodecError(_COMPLAINTS[outcome])


@njit(nogil=True, cache=True)
def _encode(symbols: int, count: int, entries: int, states: int, end: int, vectors: bool) -> int:
    """Write the stream so that it ends before ``end``; where it begins, or 0 if a symbol is uncodable."""
    groups = max(0, count - TAIL) // LANES
    lanes = LANES if groups else 1
    position = end
    marks = 0
    state = LOWEST
    for index in range(count - 1, groups * LANES - 1, -1):
        entry = _load_32(entries + _load_8(symbols + index) * 4)
        marks |= entry
        state, position = _push(state, entry, position)
    _store_32(state, states)
    for lane in range(1, lanes):
        word = 0
        if position < end:
            word = _load_16(position)
            position += WORD_BYTES
        _store_32(LOWEST | word, states + lane * STATE_BYTES)
    if vectors and _has_vectors():
        for group in range(groups - 1, -1, -1):
            entry, position = _push_group(symbols + group * LANES, entries, states, position)
            marks |= entry
    else:
        for index in range(groups * LANES - 1, -1, -1):
            lane = states + index % LANES * STATE_BYTES
            entry = _load_32(entries + _load_8(symbols + index) * 4)
            marks |= entry
            state, position = _push(_load_32(lane), entry, position)
            _store_32(state, lane)
    if marks & UNCODABLE:
        return 0
    position -= lanes * STATE_BYTES
    for offset in range(0, lanes * STATE_BYTES, STATE_BYTES):
        _store_32(_load_32(states + offset), position + offset)
    return position


@njit(nogil=True, cache=True, error_model="numpy")  # which does not look for division by zero: no frequency is
def _push(state: int, entry: int, position: int) -> tuple[int, int]:
    """Take a symbol into a state; the state after it, and where the stream begins now."""
    frequency = entry >> PRECISION_BITS & 2 * SLOTS - 1
    full = int(state >> 32 - PRECISION_BITS >= frequency)
    _store_16(state, position - WORD_BYTES)
    position -= full * WORD_BYTES
    state >>= full * WORD_BITS
    # Exact: the quotient is below 2**20, so a fraction of it is far coarser than a double's last bit.
    quotient = int(state / frequency)
    return state + quotient * (SLOTS - frequency) + (entry & SLOTS - 1), position


@njit(nogil=True, cache=True)
def _decode(begin: int, end: int, entries: int, states: int, out: int, count: int, vectors: bool) -> int:
    """Decode the stream in [begin, end) to ``count`` bytes at ``out``; one of the outcomes above."""
    groups = max(0, count - TAIL) // LANES
    lanes = LANES if groups else 1
    position = begin + lanes * STATE_BYTES
    if position > end:
        return _TRUNCATED
    if (end - position) % WORD_BYTES:
        return _INCONSISTENT
    for offset in range(0, lanes * STATE_BYTES, STATE_BYTES):
        state = _load_32(begin + offset)
        if state < LOWEST:
            return _INCONSISTENT
        _store_32(state, states + offset)
    out_end, tail = out + count, out + groups * LANES
    unhurried = end - LANES * WORD_BYTES  # up to here every lane's word is there
    if vectors and _has_vectors():
        while out < tail and position <= unhurried:
            position = _pop_group(position, entries, states, out)
            out += LANES
    while out < tail and position <= unhurried:
        for lane in range(LANES):
            entry, state = _pop(_load_32(states + lane * STATE_BYTES), entries)
            _store_8(entry, out + lane)
            wanting = int(state < LOWEST)  # arithmetic, because a branch would be mispredicted all the time
            state = state << wanting * WORD_BITS | _load_16(position) & -wanting
            position += wanting * WORD_BYTES
            _store_32(state, states + lane * STATE_BYTES)
        out += LANES
    while out < tail:
        for lane in range(LANES):
            entry, state = _pop(_load_32(states + lane * STATE_BYTES), entries)
            _store_8(entry, out + lane)
            if state < LOWEST:
                if position == end:
                    return _TRUNCATED
                state = state << WORD_BITS | _load_16(position)
                position += WORD_BYTES
            _store_32(state, states + lane * STATE_BYTES)
        out += LANES
    outcome: int = _decode_tail(position, end, entries, states, lanes, out, out_end)
    return outcome


@njit(nogil=True, cache=True)
def _decode_tail(position: int, end: int, entries: int, states: int, lanes: int, out: int, out_end: int) -> int:
    """Decode the symbols of lane 0 alone, then see whether everything is as the encoder began."""
    lane, lanes_end = states + STATE_BYTES, states + lanes * STATE_BYTES  # the lane that carries the next word
    for carrying in range(lane, lanes_end, STATE_BYTES):
        if _load_32(carrying) >= 2 * LOWEST:
            return _INCONSISTENT
    state = _load_32(states)
    for symbol in range(out, out_end):
        entry, state = _pop(state, entries)
        _store_8(entry, symbol)
        if state < LOWEST:
            if lane < lanes_end:
                word = _load_32(lane) - LOWEST
                lane += STATE_BYTES
            elif position < end:
                word = _load_16(position)
                position += WORD_BYTES
            else:
                return _TRUNCATED
            state = state << WORD_BITS | word
    for idle in range(lane, lanes_end, STATE_BYTES):
        if _load_32(idle) != LOWEST:
            return _INCONSISTENT
    if position != end:
        return _OVERLONG
    return _DONE if state == LOWEST else _INCONSISTENT


@njit(nogil=True, cache=True)
def _pop(state: int, entries: int) -> tuple[int, int]:
    """The entry of the symbol that a state took in last, and the state before it, which may want a word."""
    entry = _load_32(entries + (state & SLOTS - 1) * 4)
    return entry, ((entry >> 8 & SLOTS - 1) + 1) * (state >> PRECISION_BITS) + (entry >> 20)


_INT = {bits: ir.IntType(bits) for bits in (1, 8, 16, 32, 64)}
_LANES_OF = {bits: ir.VectorType(integer, LANES) for bits, integer in _INT.items()}


def _avx512(context: Any) -> bool:
    """Whether code is being compiled for a processor that has what the instructions for groups are made of."""
    features = context.codegen().magic_tuple()[2].split(",")
    return {"+avx512f", "+avx512bw", "+avx512vl"}.issubset(features)


@intrinsic
def _has_vectors(typing_context: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return ir.Constant(_INT[1], int(_avx512(context)))

    return types.boolean(), codegen


def _instruction(results: int, vectors: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of 64-bit integers that compiled code can call out of ``emit(builder, *arguments)``, which writes
    its LLVM IR and returns the results. With ``vectors`` it may only be called where ``_has_vectors()``."""

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
            if vectors and not _avx512(context):
                return ir.Constant(context.get_value_type(signature.return_type), None)
            emitted = emit(builder, *arguments)
            if results == 0:
                return context.get_dummy_value()
            return emitted if results == 1 else context.make_tuple(builder, signature.return_type, emitted)

        @intrinsic
        @functools.wraps(emit)
        def typed(typing_context: Any, *arguments: Any) -> Any:
            returned = (types.void, types.int64, types.UniTuple(types.int64, 2))[results]
            return returned(*[types.int64] * len(arguments)), codegen

        return typed  # type: ignore[no-any-return]

    return decorate


def _load(builder: ir.IRBuilder, address: ir.Value, of: ir.Type) -> ir.Value:
    return builder.load(builder.inttoptr(address, of.as_pointer()), align=1)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _loading(bits: int) -> Callable[..., Any]:
    return _instruction(1)(lambda builder, address: builder.zext(_load(builder, address, _INT[bits]), _INT[64]))


def _storing(bits: int) -> Callable[..., Any]:
    return _instruction(0)(lambda builder, value, address: _store(builder, builder.trunc(value, _INT[bits]), address))


_load_8, _load_16, _load_32 = _loading(8), _loading(16), _loading(32)
_store_8, _store_16, _store_32 = _storing(8), _storing(16), _storing(32)


def _every(value: int, bits: int = 32) -> ir.Constant:
    return ir.Constant(_LANES_OF[bits], [value] * LANES)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _gather(builder: ir.IRBuilder, entries: ir.Value, indices: ir.Value) -> ir.Value:
    base, scale = builder.inttoptr(entries, _INT[8].as_pointer()), ir.Constant(_INT[32], 4)
    name = "llvm.x86.avx512.mask.gather.dpi.512"
    return _call(builder, name, _LANES_OF[32], _every(0), base, indices, _every(1, 1), scale)


def _count(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    """How many lanes are in a mask, 64 bits."""
    return builder.zext(_call(builder, "llvm.ctpop.i16", _INT[16], builder.bitcast(mask, _INT[16])), _INT[64])


@_instruction(1, vectors=True)
def _pop_group(builder: Any, position: Any, entries: Any, states: Any, out: Any) -> Any:
    """Decode sixteen symbols to ``out``, with up to sixteen words from ``position``; where the stream goes on."""
    state = _load(builder, states, _LANES_OF[32])
    entry = _gather(builder, entries, builder.and_(state, _every(SLOTS - 1)))
    _store(builder, builder.trunc(entry, _LANES_OF[8]), out)
    frequency = builder.add(builder.and_(builder.lshr(entry, _every(8)), _every(SLOTS - 1)), _every(1))
    state = builder.mul(frequency, builder.lshr(state, _every(PRECISION_BITS)))
    state = builder.add(state, builder.lshr(entry, _every(20)))
    wanting = builder.icmp_unsigned("<", state, _every(LOWEST))
    words = builder.zext(_load(builder, position, _LANES_OF[16]), _LANES_OF[32])
    dealt = _call(builder, "llvm.x86.avx512.mask.expand.v16i32", _LANES_OF[32], words, _every(0), wanting)
    fed = builder.or_(builder.shl(state, _every(WORD_BITS)), dealt)
    _store(builder, builder.select(wanting, fed, state), states)
    return builder.add(position, builder.mul(_count(builder, wanting), ir.Constant(_INT[64], WORD_BYTES)))


@_instruction(2, vectors=True)
def _push_group(builder: Any, symbols: Any, entries: Any, states: Any, position: Any) -> Any:
    """Take in sixteen symbols; all their entries' bits together, and where the stream begins now."""
    state = _load(builder, states, _LANES_OF[32])
    entry = _gather(builder, entries, builder.zext(_load(builder, symbols, _LANES_OF[8]), _LANES_OF[32]))
    frequency = builder.and_(builder.lshr(entry, _every(PRECISION_BITS)), _every(2 * SLOTS - 1))
    full = builder.icmp_unsigned(">=", builder.lshr(state, _every(32 - PRECISION_BITS)), frequency)
    words = _call(builder, "llvm.x86.avx512.mask.compress.v16i32", _LANES_OF[32], state, _every(0), full)
    words = builder.trunc(words, _LANES_OF[16])
    count, one = _count(builder, full), ir.Constant(_INT[64], 1)
    position = builder.sub(position, builder.mul(count, ir.Constant(_INT[64], WORD_BYTES)))
    leading = builder.bitcast(builder.trunc(builder.sub(builder.shl(one, count), one), _INT[16]), _LANES_OF[1])
    target = builder.inttoptr(position, words.type.as_pointer())
    alignment = ir.Constant(_INT[32], 1)
    _call(builder, "llvm.masked.store.v16i16.p0", ir.VoidType(), words, target, alignment, leading)
    state = builder.select(full, builder.lshr(state, _every(WORD_BITS)), state)
    doubles = ir.VectorType(ir.DoubleType(), LANES)
    quotient = builder.fdiv(builder.uitofp(state, doubles), builder.uitofp(frequency, doubles))
    step = builder.mul(builder.fptoui(quotient, _LANES_OF[32]), builder.sub(_every(SLOTS), frequency))
    state = builder.add(builder.add(state, step), builder.and_(entry, _every(SLOTS - 1)))
    _store(builder, state, states)
    marks = _call(builder, "llvm.vector.reduce.or.v16i32", _INT[32], entry)
    return builder.zext(marks, _INT[64]), position
