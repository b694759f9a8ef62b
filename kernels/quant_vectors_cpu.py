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
from numba.core import cgutils  # type: ignore[import-untyped]
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
    wide = cols - cols % (2 * LANES) if bits == 4 else 0
    for row in range(rows):
        source, target = row * row_bytes, row * cols
        if wide:
            _look_up_nibbles(packed, source, levels, _widen(scale[row]), out, target, wide)
        if wide < cols:
            _scale_levels(levels, _widen(scale[row]), table)
            done = _look_up_words(packed, source, bits, table, out, target, cols, wide)
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
def _look_up_nibbles(
    typing_context: Any, packed: Any, source: Any, levels: Any, scale: Any, out: Any, target: Any, count: Any
) -> Any:
    """``out[target + i] = levels[code i] * scale`` of ``count`` codes of 4 bits, a multiple of 32, from
    ``packed[source]`` on. What the codes stand for stays in registers: written to memory as a table, it would be read
    again after each store to ``out``, which could be the same memory for all that LLVM knows."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        def address(argument: int, offset: ir.Value) -> ir.Value:
            return _address(context, builder, signature, arguments, argument, offset)

        floats = _load(builder, address(2, INDEX(0)), ir.VectorType(ir.FloatType(), LANES), 4)
        lone = builder.insert_element(ir.Constant(floats.type, ir.Undefined), arguments[3], POSITION(0))
        scaled = builder.fmul(floats, _pick(builder, lone, lone, [0] * LANES))
        planes = _planes(builder, _narrowed(builder, scaled, out.dtype))
        with cgutils.for_range_slice(builder, INDEX(0), arguments[6], INDEX(2 * LANES), inc=True) as (column, _):
            half = builder.udiv(column, INDEX(2))
            pairs = _load(builder, address(0, builder.add(arguments[1], half)), ir.VectorType(BYTE, LANES), 1)
            low = builder.and_(pairs, ir.Constant(pairs.type, [15] * LANES))
            high = builder.lshr(pairs, ir.Constant(pairs.type, [4] * LANES))
            found = [_join(builder, [_permute(builder, each, codes) for each in planes]) for codes in (low, high)]
            values = _weave(builder, *found)
            place = builder.bitcast(address(4, builder.add(arguments[5], column)), values.type.as_pointer())
            builder.store(values, place).align = len(planes)
        return context.get_dummy_value()

    return types.void(packed, types.intp, levels, types.float32, out, types.intp, types.intp), codegen


def _planes(builder: ir.IRBuilder, values: ir.Value) -> list[ir.Value]:
    """Elements  ->  planes of their bytes, the lowest first."""
    kind, planes = ir.VectorType(BYTE, LANES), []
    for shift in range(0, values.type.element.width, 8):
        moved = builder.lshr(values, ir.Constant(values.type, [shift] * LANES))
        planes.append(builder.trunc(moved, kind))
    return planes


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
        narrow = _narrowed(builder, arguments[0], stored)
        return builder.bitcast(narrow, ir.FloatType()) if stored == types.float32 else narrow

    return stored(types.float32, stored), codegen


def _narrowed(builder: ir.IRBuilder, value: ir.Value, stored: Any) -> ir.Value:
    """The bits of a float32, or of each in a vector, as an element of the kind ``stored``: rounded half to even."""

    def like(element: ir.Type) -> ir.Type:
        return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element

    def constant(number: int) -> ir.Value:
        kind = like(ir.IntType(32))
        return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)

    if stored == types.int16:
        return builder.bitcast(builder.fptrunc(value, like(ir.HalfType())), like(ir.IntType(16)))
    bits = builder.bitcast(value, like(ir.IntType(32)))
    if stored != types.uint16:
        return bits
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    quiet = builder.or_(bits, constant(0x400000))  # of a NaN: rounding could make it an infinity, or zero
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, constant(16)), like(ir.IntType(16)))
