"""Paged gather and scatter for vLLM's CPU layouts, compiled by Numba, on one thread, without the GIL.

A block of a layer is one contiguous run of memory, and so are its K and its V in the segment. Each block goes through
two steps, so that main memory only ever sees long sequential runs:

1. rearrange it, in vector registers, into a scratch buffer that stays in the cache,
2. stream that to its place, past the cache, without first reading the lines that are overwritten; for each line that
   goes out, one of the next block is fetched, so that step 1 finds it in the cache, however its rows are strided.

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
from numba.extending import intrinsic  # type: ignore[import-untyped]

from kernels.paged.layout import LayoutKind, PagedLayout

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
    """``kernels.paged.gather_scatter.gather`` for CPU tensors in a CPU layout; the arguments are already checked."""
    _move(_gather, layers, block_ids, layout, out)


def scatter_cpu(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.scatter`` for CPU tensors in a CPU layout; the arguments are already checked."""
    _move(_scatter, layers, block_ids, layout, src)


def _move(
    compiled: Callable[..., None],
    layers: Sequence[torch.Tensor],
    block_ids: Sequence[int],
    layout: PagedLayout,
    segment: torch.Tensor,
) -> None:
    heads, tokens, dims = layout.num_kv_heads, layout.block_size, layout.head_dim
    element_bytes = layout.dtype.itemsize
    layer_addresses = np.array([layer.data_ptr() for layer in layers], dtype=np.int64)
    # One block. Allocated here because Numba would free an array of its own after its last use as an array. An array
    # and plain integers: passing a tensor and a named tuple took three microseconds more, a third of a short call.
    scratch = np.empty(2 * tokens * heads * dims * element_bytes, dtype=np.uint8)
    is_amx = layout.kind is LayoutKind.CPU_AMX
    ids = np.asarray(block_ids, dtype=np.int64)
    compiled(layer_addresses, ids, segment.data_ptr(), scratch, is_amx, tokens, heads, dims, element_bytes)


@njit(nogil=True, cache=True)
def _gather(
    layers: np.ndarray,
    block_ids: np.ndarray,
    segment: int,
    scratch: np.ndarray,
    is_amx: bool,
    tokens: int,
    heads: int,
    dims: int,
    element_bytes: int,
) -> None:
    shape = _Block(is_amx, tokens, heads, dims, element_bytes)
    plane = tokens * heads * dims * element_bytes  # a block's K, or its V, in bytes
    k = scratch.ctypes.data
    v = k + plane
    blocks = len(block_ids)
    steps = len(layers) * blocks
    for step in range(steps):
        block = _block_address(layers, block_ids, step, plane)
        ahead = _block_address(layers, block_ids, min(step + 1, steps - 1), plane)
        if is_amx:
            _block_from_amx(block, k, v, shape)
        else:
            _block_from_vec(block, k, v, shape)
        target = _k_address(segment, blocks, step, plane)
        _write(k, target, plane, ahead)
        _write(v, target + blocks * plane, plane, ahead + plane)
    _store_fence()


@njit(nogil=True, cache=True)
def _scatter(
    layers: np.ndarray,
    block_ids: np.ndarray,
    segment: int,
    scratch: np.ndarray,
    is_amx: bool,
    tokens: int,
    heads: int,
    dims: int,
    element_bytes: int,
) -> None:
    shape = _Block(is_amx, tokens, heads, dims, element_bytes)
    plane = tokens * heads * dims * element_bytes
    block = scratch.ctypes.data
    blocks = len(block_ids)
    steps = len(layers) * blocks
    for step in range(steps):
        k = _k_address(segment, blocks, step, plane)
        ahead = _k_address(segment, blocks, min(step + 1, steps - 1), plane)
        if is_amx:
            _block_to_amx(k, k + blocks * plane, block, shape)
        else:
            _block_to_vec(k, k + blocks * plane, block, shape)
        target = _block_address(layers, block_ids, step, plane)
        _write(block, target, plane, ahead)
        _write(block + plane, target + plane, plane, ahead + blocks * plane)
    _store_fence()


@njit(nogil=True, cache=True)
def _block_address(layers: np.ndarray, block_ids: np.ndarray, step: int, plane: int) -> int:
    """Of the block that is moved in this step: layer after layer, and in a layer in the order of ``block_ids``."""
    return layers[step // len(block_ids)] + block_ids[step % len(block_ids)] * 2 * plane  # type: ignore[no-any-return]


@njit(nogil=True, cache=True)
def _k_address(segment: int, blocks: int, step: int, plane: int) -> int:
    """Of the K of this step's block in the segment; its V is ``blocks`` planes further."""
    layer, position = step // blocks, step % blocks
    return segment + (2 * layer * blocks + position) * plane


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
def _write(source: int, target: int, nbytes: int, ahead: int) -> None:
    """Copy to main memory, and fetch as many bytes from ``ahead``; ``nbytes`` is a multiple of LINE_BYTES.

    A target off the cache lines only costs speed.
    """
    is_aligned = target % LINE_BYTES == 0
    for offset in range(0, nbytes, LINE_BYTES):
        _fetch_line(ahead + offset)
        if is_aligned:
            _stream_line(source + offset, target + offset)
        else:
            _copy_line(source + offset, target + offset)


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
def _copy_line(builder: Any, source: Any, target: Any) -> None:
    _store(builder, _load(builder, source, LINE_BYTES, 8), target, 1)


@_instruction
def _fetch_line(builder: Any, address: Any) -> None:
    """For reading, into the second-level cache: the scratch buffer needs the first."""
    pointer, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
    )
    read, second_level, data = integer(0), integer(2), integer(1)
    builder.call(prefetch, [builder.inttoptr(address, pointer), read, second_level, data])


@_instruction
def _store_fence(builder: Any) -> None:
    """Streamed stores are ordered by nothing else: without it another thread could see the segment before its bytes."""
    builder.fence("seq_cst")
