"""Paged gather and scatter in Triton: the CUDA layout, all layers and blocks in one launch.

A program moves some rows of one block of one layer, where a row is the K and the V of one token and head. Elements move
as integers of their size, so every bit arrives. The layers' addresses and the block ids go to the device as one table,
because every transfer and every launch costs as much as moving some hundred kilobytes.

A segment on another device than the cache is staged on the cache's device; the call then returns when it may be read.
Otherwise the work is queued on the current stream, like any of torch's.
"""
# Triton has no type hints: mypy cannot see through its decorator.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kernels.paged.layout import PagedLayout

TILE_ELEMENTS = 2048  # of K and as many of V in a program: 16 or 32 bytes for each of its 128 threads

_INTEGERS = {2: tl.int16, 4: tl.int32}


def gather_triton(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.gather`` for ``LayoutKind.CUDA_FLASH``; the arguments are already checked, all
    layers are on one device, and all have the same strides."""
    if out.device == layers[0].device:
        _move(layers, block_ids, layout, out, to_segment=True)
    else:
        staged = torch.empty_like(out, device=layers[0].device)
        _move(layers, block_ids, layout, staged, to_segment=True)
        out.copy_(staged)


def scatter_triton(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.scatter`` for ``LayoutKind.CUDA_FLASH``; as ``gather_triton``."""
    _move(layers, block_ids, layout, src.to(layers[0].device), to_segment=False)


def _move(
    layers: Sequence[torch.Tensor],
    block_ids: Sequence[int],
    layout: PagedLayout,
    segment: torch.Tensor,
    to_segment: bool,
) -> None:
    addresses = [layer.data_ptr() for layer in layers]
    table = torch.tensor([*addresses, *block_ids], dtype=torch.int64, device=segment.device)
    element = _INTEGERS[layout.dtype.itemsize]
    columns = triton.next_power_of_2(layout.head_dim)
    rows = max(1, TILE_ELEMENTS // columns)
    grid = (len(block_ids), len(layers), triton.cdiv(layout.block_size * layout.num_kv_heads, rows))
    with torch.cuda.device_of(segment):
        _move_rows[grid](
            table,
            segment.view(torch.int16 if element is tl.int16 else torch.int32),
            *layers[0].stride(),
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
            ELEMENT=element,
            ROWS=rows,
            COLUMNS=columns,
            TO_SEGMENT=to_segment,
        )


@triton.jit
def _move_rows(
    table,  # int64: the address of every layer, then the block ids
    segment,
    block_stride,  # of a layer, in elements, as all strides
    head_stride,
    token_stride,
    dim_stride,
    tokens,  # per block
    heads,
    dims,  # per head, of K as of V
    ELEMENT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    TO_SEGMENT: tl.constexpr,  # noqa: N803
):
    position, layer = tl.program_id(0), tl.program_id(1)
    num_blocks, num_layers = tl.num_programs(0), tl.num_programs(1)
    cache = tl.load(table + layer).to(tl.pointer_type(ELEMENT))
    block = tl.load(table + num_layers + position)

    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # (token, head) in the segment's order
    dim = tl.arange(0, COLUMNS)
    inside = (row < tokens * heads)[:, None] & (dim < dims)[None, :]
    token, head = row // heads, row % heads

    # 64-bit: a cache has more than 2**31 elements.
    k = cache + block * block_stride + (token.to(tl.int64) * token_stride + head * head_stride)[:, None]
    k += (dim * dim_stride)[None, :]
    plane = num_blocks.to(tl.int64) * tokens * heads * dims  # a layer's K, or its V, in the segment
    k_segment = segment + 2 * layer * plane + position.to(tl.int64) * tokens * heads * dims
    k_segment += (row * dims)[:, None] + dim[None, :]
    if TO_SEGMENT:
        tl.store(k_segment, tl.load(k, mask=inside), mask=inside)
        tl.store(k_segment + plane, tl.load(k + dims * dim_stride, mask=inside), mask=inside)
    else:
        tl.store(k, tl.load(k_segment, mask=inside), mask=inside)
        tl.store(k + dims * dim_stride, tl.load(k_segment + plane, mask=inside), mask=inside)
