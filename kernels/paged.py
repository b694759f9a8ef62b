"""Paged gather and scatter: between the blocks of an engine's KV cache and a segment.

``gather`` reads blocks of every layer into one contiguous segment; ``scatter`` writes a segment into blocks. A layer is
a tensor ``(blocks, kv_heads, block_size, 2 * head_dim)`` as vLLM registers it; a segment is a tensor
``[layer, k|v, token, kv_head, head_dim]``, and may be a view of any buffer (``torch.frombuffer``).

Any thread may call them. On the CPU a call runs on the calling thread alone and does not hold the GIL while it copies,
so a copy thread runs beside the engine's. Nothing here locks: the caller sees to it that nobody writes the blocks that
it gathers, nor reads those that it scatters to.
"""

from collections.abc import Sequence

import torch

from kernels.layout import LayoutKind, PagedLayout
from kernels.paged_cpu import gather_cpu, scatter_cpu
from kernels.paged_index import gather_index, scatter_index


def gather(layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor) -> None:
    """Read ``block_ids``, in their order, of every layer into ``out``.

    ``out`` has ``layout.segment_shape(len(layers), len(block_ids))``. Fastest when 64-byte aligned.
    Raises ValueError, before anything is copied, when an argument does not fit the layout or a block does not exist.
    """
    _check(layers, block_ids, layout, out)
    if layout.kind is LayoutKind.CUDA_FLASH:
        gather_index(layers, block_ids, layout, out)
    else:
        gather_cpu(layers, block_ids, layout, out)


def scatter(layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor) -> None:
    """Write the segment ``src`` into ``block_ids``, in their order, of every layer. No other block is touched.

    ``src`` has ``layout.segment_shape(len(layers), len(block_ids))``.
    Raises ValueError, before anything is copied, when an argument does not fit the layout, a block does not exist, or
    one is named twice.
    """
    _check(layers, block_ids, layout, src)
    if len(set(block_ids)) != len(block_ids):
        raise ValueError("a block is named twice: which tokens it should hold is undefined")
    if layout.kind is LayoutKind.CUDA_FLASH:
        scatter_index(layers, block_ids, layout, src)
    else:
        scatter_cpu(layers, block_ids, layout, src)


def warm_up(layout: PagedLayout) -> None:
    """Compile both directions now: the first call in a fresh checkout takes seconds, later processes read the result
    from Numba's cache on disk in a fraction of one. Call it before the engine serves."""
    if layout.kind is LayoutKind.CUDA_FLASH:
        return
    layers = [torch.zeros(1, *layout.block_shape, dtype=layout.dtype)]
    segment = torch.zeros(layout.segment_shape(1, 1), dtype=layout.dtype)
    gather(layers, [0], layout, segment)
    scatter(layers, [0], layout, segment)


def _check(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, segment: torch.Tensor
) -> None:
    """Refuse what would read or write outside the tensors: the compiled code works on bare addresses."""
    if not layers or not block_ids:
        raise ValueError("need at least one layer and one block")
    expected = layout.segment_shape(len(layers), len(block_ids))
    if tuple(segment.shape) != expected or segment.dtype is not layout.dtype or not segment.is_contiguous():
        raise ValueError(
            f"segment must be contiguous {expected} of {layout.dtype}, "
            f"got {tuple(segment.shape)} of {segment.dtype}, stride {segment.stride()}"
        )
    first, last = min(block_ids), max(block_ids)
    for index, layer in enumerate(layers):
        if tuple(layer.shape[1:]) != layout.block_shape or layer.dtype is not layout.dtype:
            raise ValueError(
                f"layer {index} must be (blocks, {', '.join(map(str, layout.block_shape))}) of {layout.dtype}, "
                f"got {tuple(layer.shape)} of {layer.dtype}"
            )
        if first < 0 or last >= layer.shape[0]:
            raise ValueError(
                f"block ids {first}..{last} are not all among the {layer.shape[0]} blocks of layer {index}"
            )
        if layout.kind is not LayoutKind.CUDA_FLASH and not (layer.is_contiguous() and layer.is_cpu and segment.is_cpu):
            raise ValueError(f"{layout.kind.value}: layer {index} and the segment must be contiguous CPU tensors")
