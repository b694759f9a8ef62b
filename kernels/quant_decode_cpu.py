"""Decoding of what ``kernels.quant`` makes, for the CPU, compiled by Numba, on one thread, without the GIL.

Every step rounds as ``quant_reference.py`` does, so the results are the same bits: fastmath is off, and LLVM fuses no
multiplication with an addition of its own accord.

- **groups**: codes of 8 bits are computed 16 at a time in vector registers, those of 4 bits looked up there, 32 at a
  time; others are unpacked into bytes first.
- **vectors**: what each code of a row stands for, in the output's own dtype, is worked out once a row, and then looked
  up: no more arithmetic for each element, and codes are never unpacked into memory. Codes of 4 bits are looked up 32 at
  a time, in a vector register, byte plane by byte plane, because 16 bytes are what processors can shuffle by; others
  eight at a time, from a word of 64 bits.
- **steps**: a loop that LLVM vectorises.

Rounding to bfloat16 takes further instructions for each element that may be a NaN: that is ruled out beforehand where
it can be.

bfloat16 is uint16 to compiled code, and float16 int16, as in ``quant_cpu.py``; ``_widen`` is here once
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

from kernels.packing_cpu import unpack_cpu
from kernels.quant_reference import bits_of

LANES = 16  # bytes of a shuffle, and codes of 4 bits in it
NIBBLES = np.arange(16, dtype=np.float32)
NOTHING = np.float32(-0.0)  # what may be added to every number, to -0 too, and leaves it as it is
BYTE, WORD, INDEX = ir.IntType(8), ir.IntType(32), ir.IntType(64)
POSITION = WORD


def dequantize_groups_cpu(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, out: torch.Tensor
) -> None:
    """``kernels.quant.dequantize_groups``; the arguments are already checked, and contiguous CPU tensors."""
    group = out.shape[1] // scale.shape[1]
    if bits == 4 and group % (2 * LANES) == 0:
        dequantize = _dequantize_nibbles
    else:
        codes, dequantize = unpack_cpu(codes, bits, out.shape[1]), _dequantize_bytes
    dequantize(codes.view(-1).numpy(), _float16s(scale), _float16s(zero), group, _flat(out))


def dequantize_vectors_cpu(codes: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor, out: torch.Tensor) -> None:
    """``kernels.quant.dequantize_vectors``; as above."""
    _dequantize_vectors(
        codes.view(-1).numpy(), _float16s(scale), codebook.numpy(), bits_of(codebook), _flat(out)
    )  # fmt: skip


def dequantize_steps_cpu(symbols: torch.Tensor, step: torch.Tensor, limit: int, out: torch.Tensor) -> None:
    """``kernels.quant.dequantize_steps``; as above."""
    _dequantize_steps(symbols.numpy(), step.numpy(), np.float32(limit), _flat(out).reshape(out.shape))


def _float16s(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.view(torch.int16).view(-1).numpy()


def _flat(out: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory, with the dtype that tells compiled code its format."""
    stored = out if out.dtype is torch.float32 else out.view(_STORED[out.dtype])
    return stored.view(-1).numpy()


_STORED = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


@njit(nogil=True, cache=True, error_model="numpy")
def _dequantize_nibbles(packed: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: int, out: np.ndarray) -> None:
    for index in range(len(scale)):
        start, s, z = index * group, _widen(scale[index]), _widen(zero[index])
        _look_up_nibbles(packed, start // 2, NIBBLES, s, z, out, start, group)


@njit(nogil=True, cache=True, error_model="numpy")
def _dequantize_bytes(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: int, out: np.ndarray) -> None:
    for index in range(len(scale)):
        start, s, z = index * group, _widen(scale[index]), _widen(zero[index])
        wide = group - group % LANES if np.isfinite(s) and np.isfinite(z) else 0
        _compute_bytes(codes, start, s, z, out, wide)
        for column in range(start + wide, start + group):
            out[column] = _narrow(np.float32(codes[column]) * s + z, out[column])


@njit(nogil=True, cache=True, error_model="numpy")
def _dequantize_steps(symbols: np.ndarray, step: np.ndarray, limit: np.float32, out: np.ndarray) -> None:
    numbers = np.isfinite(step).all()
    for row in range(out.shape[0]):
        values, target = symbols[row], out[row]
        if numbers:
            for column in range(len(target)):
                value = (np.float32(values[column]) - limit) * step[column]
                target[column] = _narrow_number(value, target[column])
        else:
            for column in range(len(target)):
                target[column] = _narrow((np.float32(values[column]) - limit) * step[column], target[column])


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
            _look_up_nibbles(packed, source, levels, _widen(scale[row]), NOTHING, out, target, wide)
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
def _compute_bytes(typing_context: Any, codes: Any, start: Any, scale: Any, zero: Any, out: Any, count: Any) -> Any:
    """``out[start + i] = codes[start + i] * scale + zero`` for ``count`` codes, a multiple of 16, where scale and zero
    are finite."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _, start, scale, zero, _, count = arguments
        factor, offset = _spread(builder, scale), _spread(builder, zero)
        with cgutils.for_range_slice(builder, INDEX(0), count, INDEX(LANES), inc=True) as (column, _):
            at = builder.add(start, column)
            source = _address(context, builder, signature, arguments, 0, at)
            found = builder.zext(_load(builder, source, ir.VectorType(BYTE, LANES), 1), _like(WORD, factor.type))
            value = builder.fadd(builder.fmul(builder.sitofp(found, factor.type), factor), offset)
            _store(builder, _narrowed(builder, value, out.dtype, number=True),
                   _address(context, builder, signature, arguments, 4, at))  # fmt: skip
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.float32, types.float32, out, types.intp), codegen


@intrinsic
def _look_up_nibbles(
    typing_context: Any, packed: Any, source: Any, levels: Any, scale: Any, zero: Any, out: Any, target: Any, count: Any
) -> Any:
    """``out[target + i] = levels[code i] * scale + zero`` of ``count`` codes of 4 bits, a multiple of 32, from
    ``packed[source]`` on. What the codes stand for stays in registers: written to memory as a table, it would be read
    again after each store to ``out``, which could be the same memory for all that LLVM knows."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        def address(argument: int, offset: ir.Value) -> ir.Value:
            return _address(context, builder, signature, arguments, argument, offset)

        floats = _load(builder, address(2, INDEX(0)), ir.VectorType(ir.FloatType(), LANES), 4)
        scaled = builder.fmul(floats, _spread(builder, arguments[3]))
        shifted = builder.fadd(scaled, _spread(builder, arguments[4]))
        planes = _planes(builder, _narrowed(builder, shifted, out.dtype))
        with cgutils.for_range_slice(builder, INDEX(0), arguments[7], INDEX(2 * LANES), inc=True) as (column, _):
            half = builder.udiv(column, INDEX(2))
            pairs = _load(builder, address(0, builder.add(arguments[1], half)), ir.VectorType(BYTE, LANES), 1)
            low = builder.and_(pairs, ir.Constant(pairs.type, [15] * LANES))
            high = builder.lshr(pairs, ir.Constant(pairs.type, [4] * LANES))
            found = [_join(builder, [_permute(builder, each, codes) for each in planes]) for codes in (low, high)]
            _store(builder, _weave(builder, *found), address(5, builder.add(arguments[6], column)))
        return context.get_dummy_value()

    floats = (types.float32, types.float32)
    return types.void(packed, types.intp, levels, *floats, out, types.intp, types.intp), codegen


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


def _store(builder: ir.IRBuilder, values: ir.Value, address: ir.Value) -> None:
    """Elements that lie as an array of theirs does; floats may come as their bits."""
    place = builder.bitcast(address, values.type.as_pointer())
    builder.store(values, place).align = values.type.element.width // 8


def _spread(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """A float32 in every lane."""
    lone = builder.insert_element(ir.Constant(ir.VectorType(ir.FloatType(), LANES), ir.Undefined), number, POSITION(0))
    return _pick(builder, lone, lone, [0] * LANES)


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
    return _narrowing(stored, number=False)


@intrinsic
def _narrow_number(typing_context: Any, value: Any, stored: Any) -> Any:
    """`_narrow` of what is no NaN."""
    return _narrowing(stored, number=True)


def _narrowing(stored: Any, number: bool) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        narrow = _narrowed(builder, arguments[0], stored, number)
        return builder.bitcast(narrow, ir.FloatType()) if stored == types.float32 else narrow

    return stored(types.float32, stored), codegen


def _narrowed(builder: ir.IRBuilder, value: ir.Value, stored: Any, number: bool = False) -> ir.Value:
    """The bits of a float32, or of each in a vector, as an element of the kind ``stored``: rounded half to even.
    ``number``: none is a NaN."""

    def constant(bits: int) -> ir.Value:
        kind = _like(WORD, value.type)
        return ir.Constant(kind, [bits] * kind.count if isinstance(kind, ir.VectorType) else bits)

    if stored == types.int16:
        half = builder.fptrunc(value, _like(ir.HalfType(), value.type))
        return builder.bitcast(half, _like(ir.IntType(16), value.type))
    bits = builder.bitcast(value, _like(WORD, value.type))
    if stored != types.uint16:
        return bits
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    kept = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    if not number:
        quiet = builder.or_(bits, constant(0x400000))  # rounding could make a NaN an infinity, or zero
        kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, kept)
    return builder.trunc(builder.lshr(kept, constant(16)), _like(ir.IntType(16), value.type))


def _like(element: ir.Type, kind: ir.Type) -> ir.Type:
    """``element``, or a vector of as many of it as ``kind`` has."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element
