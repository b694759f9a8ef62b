"""Decoding of vectors (``kernels.quant``) for the CPU, compiled by Numba, on one thread, without the GIL.

What each code of a row stands for, in the output's own dtype, is worked out once a row, and then looked up: no more
arithmetic for each element, and codes are never unpacked into memory. Codes of 4 bits are looked up 32 at a time, in
a vector register, byte plane by byte plane, because 16 bytes are what processors can shuffle by; others eight at a
time, from a word of 64 bits.

bfloat16 is uint16 to compiled code, and float16 int16, as in ``quant_cpu.py``; ``_widen`` and ``_narrow`` are here once
more because Numba's cache on disk notices edits of the compiled function's own file only. Bytes are in little-endian
order, as on everything that Numba compiles for.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]
from numba.np import arrayobj  # type: ignore[import-untyped]

from kernels.quant_reference import bits_of

LANES = 16  # bytes of a shuffle, and codes of 4 bits in it
BYTE, INDEX, POSITION = ir.IntType(8), ir.IntType(64), ir.IntType(32)


def dequantize_vectors_cpu(codes: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor, out: torch.Tensor) -> None:
    """``kernels.quant.dequantize_vectors``; the arguments are already checked, and contiguous CPU tensors."""
    target = out if out.dtype is torch.float32 else out.view(_STORED[out.dtype])
    _dequantize_vectors(
        codes.view(-1).numpy(), scale.view(torch.int16).numpy(), codebook.numpy(), bits_of(codebook),
        target.view(-1).numpy(),
    )  # fmt: skip


_STORED = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


@njit(nogil=True, cache=True, error_model="numpy")
def _dequantize_vectors(packed: np.ndarray, scale: np.ndarray, levels: np.ndarray, bits: int, out: np.ndarray) -> None:
    """``packed`` and ``out`` are flat: a slice for each row would take longer than a row of 4 bits."""
    rows = len(scale)
    cols, row_bytes = len(out) // rows, len(packed) // rows
    table = np.empty(len(levels), out.dtype)
    for row in range(rows):
        source, target = row * row_bytes, row * cols
        _scale_levels(levels, _widen(scale[row]), table)
        done = 0
        if bits == 4:
            done = cols - cols % (2 * LANES)
            for column in range(0, done, 2 * LANES):
                _look_up_nibbles(packed, source + column // 2, table, out, target + column)
        done = _look_up_words(packed, source, bits, table, out, target, cols, done)
        _look_up_each(packed, source, bits, table, out, target, cols, done)


@njit(nogil=True, cache=True, error_model="numpy")
def _scale_levels(levels: np.ndarray, scale: np.float32, table: np.ndarray) -> None:
    for code in range(len(levels)):
        table[code] = _narrow(levels[code] * scale, table[code])


@njit(nogil=True, cache=True, error_model="numpy")
def _look_up_words(
    packed: np.ndarray, source: int, bits: int, table: np.ndarray, out: np.ndarray, target: int, cols: int, done: int
) -> int:
    """Eight codes, ``bits`` bytes, at a time, while a word that begins with them is within ``packed``; returns the
    columns that are done. What is done before is a multiple of eight."""
    mask, width = np.uint64(len(table) - 1), np.uint64(bits)
    within = max(0, (len(packed) - source - 8) // bits + 1)
    words = min(cols // 8, within)
    for index in range(done // 8, words):
        word = _word(packed, source + index * bits)
        for place in range(8):
            out[target + index * 8 + place] = table[word & mask]
            word >>= width
    return max(done, words * 8)


@njit(nogil=True, cache=True, error_model="numpy")
def _look_up_each(
    packed: np.ndarray, source: int, bits: int, table: np.ndarray, out: np.ndarray, target: int, cols: int, done: int
) -> None:
    mask = np.uint32(len(table) - 1)
    for column in range(done, cols):
        byte, place = source + (column * bits >> 3), column * bits & 7
        window = np.uint32(packed[byte])
        if place + bits > 8:
            window |= np.uint32(packed[byte + 1]) << np.uint32(8)
        out[target + column] = table[window >> np.uint32(place) & mask]


@intrinsic
def _word(typing_context: Any, packed: Any, offset: Any) -> Any:
    """The 8 bytes from ``packed[offset]`` on, as one number."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return _load(builder, _address(context, builder, signature, arguments, 0, arguments[1]), INDEX, 1)

    return types.uint64(packed, types.intp), codegen


@intrinsic
def _look_up_nibbles(typing_context: Any, packed: Any, source: Any, table: Any, out: Any, target: Any) -> Any:
    """``out[target + i] = table[code i]`` of the 32 codes of 4 bits from ``packed[source]`` on."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        def address(argument: int, offset: ir.Value) -> ir.Value:
            return _address(context, builder, signature, arguments, argument, offset)

        itemsize = table.dtype.bitwidth // 8
        pairs = _load(builder, address(0, arguments[1]), ir.VectorType(BYTE, LANES), 1)
        entries = _load(builder, address(2, INDEX(0)), ir.VectorType(BYTE, LANES * itemsize), itemsize)
        planes = [_pick(builder, entries, entries, range(byte, LANES * itemsize, itemsize)) for byte in range(itemsize)]
        nibble = ir.Constant(pairs.type, [4] * LANES)
        halves = builder.and_(pairs, ir.Constant(pairs.type, [15] * LANES)), builder.lshr(pairs, nibble)
        first, second = (_join(builder, [_permute(builder, plane, half) for plane in planes]) for half in halves)
        values = _weave(builder, first, second)
        place = builder.bitcast(address(3, arguments[4]), values.type.as_pointer())
        builder.store(values, place).align = itemsize
        return context.get_dummy_value()

    return types.void(packed, types.intp, table, out, types.intp), codegen


def _address(
    context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, argument: int, offset: ir.Value
) -> ir.Value:
    """Of the element of an array among the arguments."""
    array = arrayobj.make_array(signature.args[argument])(context, builder, arguments[argument])
    return builder.gep(array.data, [offset])


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    loaded = builder.load(builder.bitcast(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def _permute(builder: ir.IRBuilder, plane: ir.Value, indices: ir.Value) -> ir.Value:
    """``plane[indices[i]]`` for each i. Where the processor has an instruction for that, LLVM sees that it is meant (on
    x86 ``pshufb``), as long as the indices come out of no shuffle of their own, with which it would merge these."""
    result = ir.Constant(plane.type, ir.Undefined)
    for lane in range(LANES):
        index = builder.zext(builder.extract_element(indices, POSITION(lane)), INDEX)
        result = builder.insert_element(result, builder.extract_element(plane, index), POSITION(lane))
    return result


def _join(builder: ir.IRBuilder, planes: list[ir.Value]) -> ir.Value:
    """Planes of an element's bytes, the lowest first  ->  the elements."""
    while len(planes) > 1:
        wider = ir.VectorType(ir.IntType(2 * planes[0].type.element.width), LANES)
        joined = [_weave(builder, low, high) for low, high in zip(planes[::2], planes[1::2], strict=True)]
        planes = [builder.bitcast(each, wider) for each in joined]
    return planes[0]


def _weave(builder: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    return _pick(builder, even, odd, [lane for index in range(LANES) for lane in (index, LANES + index)])


def _pick(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: Any) -> ir.Value:
    chosen = list(lanes)
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(POSITION, len(chosen)), chosen))


@intrinsic
def _widen(typing_context: Any, stored: Any) -> Any:
    """The float32 of a stored float16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(stored), codegen


@intrinsic
def _narrow(typing_context: Any, value: Any, stored: Any) -> Any:
    """``value`` as an element of the kind of ``stored``, whose own value is not looked at: rounded half to even."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        value, _ = arguments
        if stored == types.int16:
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        if stored != types.uint16:
            return value
        word = ir.IntType(32)
        bits = builder.bitcast(value, word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(builder.add(bits, word(0x7FFF)), odd)
        quiet = builder.or_(bits, word(0x400000))  # of a NaN: rounding could make it an infinity, or zero
        kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        return builder.trunc(builder.lshr(kept, word(16)), ir.IntType(16))

    return stored(types.float32, stored), codegen
