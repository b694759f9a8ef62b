"""Paged gather and scatter for vLLM's CPU layouts, compiled by Numba, on one thread, without the GIL.

A block of a layer is one contiguous run of memory, and so are its K and its V in the segment. Each block goes through
three steps, so that main memory only ever sees long sequential runs:

1. copy the run into a scratch buffer that stays in the cache,
2. rearrange it there, in vector registers, into a second scratch buffer,
3. stream that to its place, past the cache, without first reading the lines that are overwritten.

One compiled call moves all layers: the GIL is given up and taken back once, not once per layer, because taking it back
can cost a whole switch interval (5 ms) while the engine's thread is busy.

Below the two entry points everything works on byte addresses, as 64-bit integers, and checks nothing. What Numba has
no words for (vector shuffles, streaming stores) is a few lines of LLVM IR, which compile to the machine's own vectors.
It all stays in this file because Numba's cache on disk notices edits of the compiled function's own file only.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from kernels.layout import LayoutKind, PagedLayout

LINE_BYTES = 64  # a cache line: what is streamed at a time, and how its target must be aligned

# A tile is 8 x 8 elements of 2 or 4 bytes: eight 128 or 256-bit registers, which every x86-64-v3 and ARM machine has.
# Tiles of 16 and 32, where they fit, were no faster.
TILE = 8


class _Block(NamedTuple):
    """The shape of one block of one layer, for compiled code."""

    is_amx: bool
    tokens: int
    heads: int
    dims: int
    element_bytes: int


def gather_cpu(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor
) -> None:
    """``kernels.paged.gather`` for CPU tensors in a CPU layout; the arguments are already checked."""
    _move(_gather, layers, block_ids, layout, out)


def scatter_cpu(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """``kernels.paged.scatter`` for CPU tensors in a CPU layout; the arguments are already checked."""
    _move(_scatter, layers, block_ids, layout, src)


def _move(
    compiled: Callable[[np.ndarray, np.ndarray, int, int, _Block], None],
    layers: Sequence[torch.Tensor],
    block_ids: Sequence[int],
    layout: PagedLayout,
    segment: torch.Tensor,
) -> None:
    is_amx = layout.kind is LayoutKind.CPU_AMX
    shape = _Block(is_amx, layout.block_size, layout.num_kv_heads, layout.head_dim, layout.dtype.itemsize)
    layer_addresses = np.array([layer.data_ptr() for layer in layers], dtype=np.int64)
    # Two blocks. Allocated here because Numba would free an array of its own after its last use as an array.
    scratch = torch.empty((2, *layout.block_shape), dtype=layout.dtype)
    compiled(layer_addresses, np.asarray(block_ids, dtype=np.int64), segment.data_ptr(), scratch.data_ptr(), shape)


@njit(nogil=True, cache=True)
def _gather(layers: np.ndarray, block_ids: np.ndarray, segment: int, scratch: int, shape: _Block) -> None:
    plane = shape.tokens * shape.heads * shape.dims * shape.element_bytes  # a block's K, or its V, in bytes
    block, k, v = scratch, scratch + 2 * plane, scratch + 3 * plane
    for layer in range(len(layers)):
        k_target = segment + 2 * layer * len(block_ids) * plane
        v_target = k_target + len(block_ids) * plane
        for position in range(len(block_ids)):
            _copy(layers[layer] + block_ids[position] * 2 * plane, block, 2 * plane)
            if shape.is_amx:
                _block_from_amx(block, k, v, shape)
            else:
                _block_from_vec(block, k, v, shape)
            _write(k, k_target + position * plane, plane)
            _write(v, v_target + position * plane, plane)
    _store_fence()


@njit(nogil=True, cache=True)
def _scatter(layers: np.ndarray, block_ids: np.ndarray, segment: int, scratch: int, shape: _Block) -> None:
    plane = shape.tokens * shape.heads * shape.dims * shape.element_bytes
    block, k, v = scratch, scratch + 2 * plane, scratch + 3 * plane
    for layer in range(len(layers)):
        k_source = segment + 2 * layer * len(block_ids) * plane
        v_source = k_source + len(block_ids) * plane
        for position in range(len(block_ids)):
            _copy(k_source + position * plane, k, plane)
            _copy(v_source + position * plane, v, plane)
            if shape.is_amx:
                _block_to_amx(k, v, block, shape)
            else:
                _block_to_vec(k, v, block, shape)
            _write(block, layers[layer] + block_ids[position] * 2 * plane, 2 * plane)
    _store_fence()


@njit(nogil=True, cache=True)
def _block_from_vec(block: int, k: int, v: int, shape: _Block) -> None:
    """Per head: K ``[dims, tokens]``, V ``[tokens, dims]``  ->  k and v ``[tokens, heads, dims]``."""
    row = shape.dims * shape.element_bytes
    column = shape.tokens * shape.element_bytes
    for head in range(shape.heads):
        cell = block + head * 2 * shape.tokens * row
        _transpose(cell, column, k + head * row, shape.heads * row, shape.dims, shape.tokens, shape.element_bytes)
        _copy_rows(cell + shape.tokens * row, row, v + head * row, shape.heads * row, shape.tokens, row)


@njit(nogil=True, cache=True)
def _block_to_vec(k: int, v: int, block: int, shape: _Block) -> None:
    """The reverse of ``_block_from_vec``."""
    row = shape.dims * shape.element_bytes
    column = shape.tokens * shape.element_bytes
    for head in range(shape.heads):
        cell = block + head * 2 * shape.tokens * row
        _transpose(k + head * row, shape.heads * row, cell, column, shape.tokens, shape.dims, shape.element_bytes)
        _copy_rows(v + head * row, shape.heads * row, cell + shape.tokens * row, row, shape.tokens, row)


@njit(nogil=True, cache=True)
def _block_from_amx(block: int, k: int, v: int, shape: _Block) -> None:
    """Per head: K ``[tokens/16, dims/2, 16, 2]``, V ``[dims/16, tokens/2, 16, 2]``  ->  ``[tokens, heads, dims]``.

    A pair of K's dims moves as one 4-byte element.
    """
    row = shape.dims * 2
    stride = shape.heads * row
    for head in range(shape.heads):
        cell = block + head * 2 * shape.tokens * row
        for token in range(0, shape.tokens, 16):
            _transpose(cell + token * row, 16 * 4, k + token * stride + head * row, stride, shape.dims // 2, 16, 4)
        pairs = cell + shape.tokens * row
        for dim in range(0, shape.dims, 16):
            for token in range(0, shape.tokens, 2):
                even = v + token * stride + head * row + dim * 2
                _split_16_pairs(pairs, even, even + stride)
                pairs += 16 * 2 * 2


@njit(nogil=True, cache=True)
def _block_to_amx(k: int, v: int, block: int, shape: _Block) -> None:
    """The reverse of ``_block_from_amx``."""
    row = shape.dims * 2
    stride = shape.heads * row
    for head in range(shape.heads):
        cell = block + head * 2 * shape.tokens * row
        for token in range(0, shape.tokens, 16):
            _transpose(k + token * stride + head * row, stride, cell + token * row, 16 * 4, 16, shape.dims // 2, 4)
        pairs = cell + shape.tokens * row
        for dim in range(0, shape.dims, 16):
            for token in range(0, shape.tokens, 2):
                even = v + token * stride + head * row + dim * 2
                _join_16_pairs(even, even + stride, pairs)
                pairs += 16 * 2 * 2


@njit(nogil=True, cache=True)
def _transpose(
    source: int, source_stride: int, target: int, target_stride: int, rows: int, columns: int, element_bytes: int
) -> None:
    """``target[c][r] = source[r][c]``; strides are the bytes between rows; rows and columns are multiples of TILE."""
    for column in range(0, columns, TILE):
        for row in range(0, rows, TILE):
            tile = source + row * source_stride + column * element_bytes
            transposed = target + column * target_stride + row * element_bytes
            if element_bytes == 2:
                _transpose_tile_16bit(tile, source_stride, transposed, target_stride)
            else:
                _transpose_tile_32bit(tile, source_stride, transposed, target_stride)


@njit(nogil=True, cache=True)
def _copy_rows(source: int, source_stride: int, target: int, target_stride: int, rows: int, row_bytes: int) -> None:
    """Copy ``rows`` rows of ``row_bytes``, a multiple of 32 because ``head_dim`` is one of 16."""
    for row in range(rows):
        for offset in range(0, row_bytes, 32):
            _copy_32_bytes(source + row * source_stride + offset, target + row * target_stride + offset)


@njit(nogil=True, cache=True)
def _write(source: int, target: int, nbytes: int) -> None:
    """Copy to main memory; ``nbytes`` is a multiple of LINE_BYTES. A target off the cache lines only costs speed."""
    if target % LINE_BYTES:
        _copy(source, target, nbytes)
    else:
        for offset in range(0, nbytes, LINE_BYTES):
            _stream_line(source + offset, target + offset)


def _instruction(emit: Callable[..., None]) -> Callable[..., None]:
    """Make a function that compiled code can call out of ``emit(builder, *addresses)``, which writes its LLVM IR."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        emit(builder, *arguments)
        return context.get_dummy_value()

    @intrinsic
    @functools.wraps(emit)
    def typed(typing_context: Any, *arguments: Any) -> Any:
        return types.void(*[types.int64] * len(arguments)), codegen

    return typed  # type: ignore[no-any-return]


def _load(builder: ir.IRBuilder, address: ir.Value, lanes: int, lane_bits: int) -> ir.Value:
    vector = ir.VectorType(ir.IntType(lane_bits), lanes)
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=lane_bits // 8)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int) -> ir.Instruction:
    return builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _shuffle(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: Sequence[int]) -> ir.Value:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(first, second, mask)


def _emit_transpose(
    builder: ir.IRBuilder, lane_bits: int, source: Any, source_stride: Any, target: Any, target_stride: Any
) -> None:
    """Number a tile's elements by the bits of (row, column). Interleaving the first half of the rows with the second
    rotates those bits by one place, so log2(TILE) rounds exchange row and column."""
    low_lanes = [column // 2 + column % 2 * TILE for column in range(TILE)]
    high_lanes = [lane + TILE // 2 for lane in low_lanes]
    rows = []
    for _ in range(TILE):
        rows.append(_load(builder, source, TILE, lane_bits))
        source = builder.add(source, source_stride)
    for _ in range(TILE.bit_length() - 1):
        halves = zip(rows[: TILE // 2], rows[TILE // 2 :], strict=True)
        rows = [_shuffle(builder, low, high, lanes) for low, high in halves for lanes in (low_lanes, high_lanes)]
    for row in rows:
        _store(builder, row, target, lane_bits // 8)
        target = builder.add(target, target_stride)


@_instruction
def _transpose_tile_16bit(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    _emit_transpose(builder, 16, source, source_stride, target, target_stride)


@_instruction
def _transpose_tile_32bit(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    _emit_transpose(builder, 32, source, source_stride, target, target_stride)


@_instruction
def _split_16_pairs(builder: Any, pairs: Any, even: Any, odd: Any) -> None:
    value = _load(builder, pairs, 32, 16)
    _store(builder, _shuffle(builder, value, value, range(0, 32, 2)), even, 2)
    _store(builder, _shuffle(builder, value, value, range(1, 32, 2)), odd, 2)


@_instruction
def _join_16_pairs(builder: Any, even: Any, odd: Any, pairs: Any) -> None:
    lanes = [pair + 16 * member for pair in range(16) for member in (0, 1)]
    _store(builder, _shuffle(builder, _load(builder, even, 16, 16), _load(builder, odd, 16, 16), lanes), pairs, 2)


@_instruction
def _copy_32_bytes(builder: Any, source: Any, target: Any) -> None:
    _store(builder, _load(builder, source, 32, 8), target, 1)


@_instruction
def _stream_line(builder: Any, source: Any, target: Any) -> None:
    store = _store(builder, _load(builder, source, LINE_BYTES, 8), target, LINE_BYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@_instruction
def _copy(builder: Any, source: Any, target: Any, nbytes: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(builder, builder.inttoptr(target, pointer), builder.inttoptr(source, pointer), nbytes, 1)


@_instruction
def _store_fence(builder: Any) -> None:
    """Streamed stores are ordered by nothing else: without it another thread could see the segment before its bytes."""
    builder.fence("seq_cst")
