"""Paged gather and scatter of blocks whose inner order nothing here knows: bytes go as they are.

A block is one contiguous run of memory. A segment has the first half of each block where other layouts have keys, and
the second where they have values, block after block: so the blocks that a segment begins with are those of its
beginning, as in every other layout. Two calls a layer, however many blocks: torch gives the GIL up while it copies.
"""

from collections.abc import Sequence

import torch

from kernels.paged.layout import PagedLayout


def gather_opaque(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.gather`` for CPU tensors of bytes; the arguments are already checked."""
    ids = torch.tensor(block_ids)
    for layer, halves in zip(layers, _halves_of_segment(out, layout), strict=True):
        blocks = _halves_of_blocks(layer)
        for half in range(2):
            torch.index_select(blocks[:, half], 0, ids, out=halves[half])


def scatter_opaque(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.scatter`` for CPU tensors of bytes; the arguments are already checked."""
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
