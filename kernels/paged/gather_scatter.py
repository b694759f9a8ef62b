"""Paged gather and scatter: between the blocks of an engine's KV cache and a segment.

``gather`` reads blocks of every layer into one contiguous segment; ``scatter`` writes a segment into blocks. A layer is
a tensor ``(blocks, kv_heads, block_size, 2 * head_dim)`` as vLLM registers it; a segment is a tensor
``[layer, k|v, token, kv_head, head_dim]``, and may be a view of any buffer (``torch.frombuffer``). Of latents there is
one half (``kernels.paged.layout``).

Any thread may call them. On the CPU a call runs on the calling thread alone and does not hold the GIL while it copies,
so a copy thread runs in parallel with the engine's. On CUDA the work is queued on the current stream. With a segment on
the CPU ``gather`` returns when it is done, ``scatter`` when the segment has been read: what it writes is there for the
same stream, and for others once an event says so. Nothing here locks: the caller ensures that no other thread writes
the blocks that it gathers, or reads those that it scatters to.

A layer or a group of layers alone is moved with ``layers[i:j]`` and ``segment[i:j]``.

Of blocks whose inner order nothing here knows, bytes go as they are. Such a block is one contiguous run of memory. A
segment has the first half of each block where other layouts have keys, and the second where they have values, block
after block: so the blocks that a segment begins with are those of its beginning, as in every other layout. Two calls a
layer, however many blocks: torch gives the GIL up while it copies.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence

import torch

from kernels.compiling import one_compiles
from kernels.paged.cpu import gather_cpu, scatter_cpu
from kernels.paged.index import gather_index, gather_latents, scatter_index, scatter_latents
from kernels.paged.layout import ON_ANY_DEVICE, LayoutKind, PagedLayout

logger = logging.getLogger(__name__)

_Move = Callable[[Sequence[torch.Tensor], Sequence[int], PagedLayout, torch.Tensor], None]


def gather(layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor) -> None:
    """Read ``block_ids``, in their order, of every layer into ``out``.

    ``out`` has ``layout.segment_shape(len(layers), len(block_ids))``. Fastest when 64-byte aligned.
    Raises ValueError, before anything is copied, when an argument does not fit the layout or a block does not exist.
    """
    _check(layers, block_ids, layout, out)
    if layout.kind is LayoutKind.CUDA_FLASH:
        _device_version(layers)[0](layers, block_ids, layout, out)
    elif layout.kind is LayoutKind.LATENT:
        gather_latents(layers, block_ids, layout, out)
    elif layout.kind is LayoutKind.OPAQUE:
        gather_opaque(layers, block_ids, layout, out)
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
        _device_version(layers)[1](layers, block_ids, layout, src)
    elif layout.kind is LayoutKind.LATENT:
        scatter_latents(layers, block_ids, layout, src)
    elif layout.kind is LayoutKind.OPAQUE:
        scatter_opaque(layers, block_ids, layout, src)
    else:
        scatter_cpu(layers, block_ids, layout, src)


def warm_up(layout: PagedLayout) -> None:
    """Compile both directions now: the first call in a fresh checkout takes seconds, others wait for its result, which
    lies in Numba's cache on disk. Call it before the engine serves."""
    on_cuda = layout.kind is LayoutKind.CUDA_FLASH and torch.cuda.is_available()
    layer = torch.zeros(1, *layout.block_shape, dtype=layout.dtype, device="cuda" if on_cuda else "cpu")
    segment = torch.zeros(layout.segment_shape(1, 1), dtype=layout.dtype)
    # Triton compiles once more for other strides: here for both of vLLM's memory orders.
    caches = (layer, layer.transpose(1, 2).contiguous().transpose(1, 2)) if on_cuda else (layer,)
    with contextlib.nullcontext() if on_cuda else one_compiles("paged"):
        for cache in caches:
            gather([cache], [0], layout, segment)
            scatter([cache], [0], layout, segment)


def _device_version(layers: Sequence[torch.Tensor]) -> tuple[_Move, _Move]:
    """What gathers and what scatters ``LayoutKind.CUDA_FLASH``, on whatever device the layers are."""
    first = layers[0]
    if not first.is_cuda or any(layer.stride() != first.stride() for layer in layers):
        return gather_index, scatter_index
    return _cuda_version(first.device)


@functools.cache
def _cuda_version(device: torch.device) -> tuple[_Move, _Move]:
    """Triton's where it works on this device, else torch's indexing, and a warning, once."""
    try:
        from kernels.paged.triton import gather_triton, scatter_triton

        layout = PagedLayout(LayoutKind.CUDA_FLASH, 1, 1, 1, torch.float32)
        cache, segment = torch.zeros(1, 1, 1, 2, device=device), torch.zeros(1, 2, 1, 1, 1)
        scatter_triton([cache], [0], layout, segment)
        gather_triton([cache], [0], layout, segment)
    except Exception as error:  # it compiles only now, with a C compiler and a driver that may be missing: many kinds
        logger.warning("copies between cache and segments go without Triton, which fails here: %r", error)
        return gather_index, scatter_index
    return gather_triton, scatter_triton


def _check(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, segment: torch.Tensor
) -> None:
    """Refuse what would read or write outside the tensors: the compiled code works on bare addresses."""
    if not layers or not block_ids:
        raise ValueError("need at least one layer and one block")
    expected = layout.segment_shape(len(layers), len(block_ids))
    if segment.shape != expected or segment.dtype is not layout.dtype or not segment.is_contiguous():
        raise ValueError(
            f"segment must be contiguous {expected} of {layout.dtype}, "
            f"got {tuple(segment.shape)} of {segment.dtype}, stride {segment.stride()}"
        )
    first, last = min(block_ids), max(block_ids)
    block_shape = layout.block_shape
    on_cpu = layout.kind not in ON_ANY_DEVICE
    for index, layer in enumerate(layers):
        if layer.shape[1:] != block_shape or layer.dtype is not layout.dtype:
            raise ValueError(
                f"layer {index} must be (blocks, {', '.join(map(str, block_shape))}) of {layout.dtype}, "
                f"got {tuple(layer.shape)} of {layer.dtype}"
            )
        if first < 0 or last >= layer.shape[0]:
            raise ValueError(
                f"block ids {first}..{last} are not all among the {layer.shape[0]} blocks of layer {index}"
            )
        if on_cpu and not (layer.is_contiguous() and layer.is_cpu and segment.is_cpu):
            raise ValueError(f"{layout.kind.value}: layer {index} and the segment must be contiguous CPU tensors")
        if not on_cpu and layer.device != layers[0].device:
            raise ValueError(f"layer {index} is on {layer.device}, layer 0 on {layers[0].device}")


def gather_opaque(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor
) -> None:
    """``gather`` for CPU tensors of bytes; the arguments are already checked."""
    ids = torch.tensor(block_ids)
    for layer, halves in zip(layers, _halves_of_segment(out, layout), strict=True):
        blocks = _halves_of_blocks(layer)
        for half in range(2):
            torch.index_select(blocks[:, half], 0, ids, out=halves[half])


def scatter_opaque(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """``scatter`` for CPU tensors of bytes; the arguments are already checked."""
    ids = torch.tensor(block_ids)
    for layer, halves in zip(layers, _halves_of_segment(src, layout), strict=True):
        blocks = _halves_of_blocks(layer)
        for half in range(2):
            blocks[:, half].index_copy_(0, ids, halves[half])


def _halves_of_blocks(layer: torch.Tensor) -> torch.Tensor:
    """A layer as ``(blocks, 2, bytes)``."""
    return layer.view(layer.shape[0], 2, -1)


def _halves_of_segment(segment: torch.Tensor, layout: PagedLayout) -> torch.Tensor:
    """A segment as ``(layers, 2, blocks, bytes)``."""
    return segment.view(segment.shape[0], 2, segment.shape[2] // layout.block_size, -1)
