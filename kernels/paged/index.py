"""Paged gather and scatter by ``index_select`` and ``index_copy_``, on any device: the CUDA layout, and latents.

Per layer, one indexed read or write of all blocks. A segment on another device than the cache is copied across; the
call returns when it may be read.
"""

from collections.abc import Sequence

import torch

from kernels.paged.layout import PagedLayout


def gather_index(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.gather`` for ``LayoutKind.CUDA_FLASH``; the arguments are already checked."""
    ids = torch.tensor(block_ids, dtype=torch.int64, device=layers[0].device)
    for cache, segment in zip(layers, out, strict=True):
        blocks = cache.transpose(1, 2).index_select(0, ids).flatten(0, 1)  # [token, kv_head, 2 * head_dim]
        segment[0].copy_(blocks[..., : layout.head_dim])
        segment[1].copy_(blocks[..., layout.head_dim :])


def scatter_index(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.scatter`` for ``LayoutKind.CUDA_FLASH``; the arguments are already checked."""
    ids = torch.tensor(block_ids, dtype=torch.int64, device=layers[0].device)
    shape = (len(block_ids), layout.block_size, layout.num_kv_heads, 2 * layout.head_dim)
    for cache, segment in zip(layers, src, strict=True):
        k, v = segment.to(cache.device)
        cache.transpose(1, 2).index_copy_(0, ids, torch.cat((k, v), dim=-1).view(shape))


def gather_latents(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.gather`` for ``LayoutKind.LATENT``; the arguments are already checked."""
    ids = torch.tensor(block_ids, dtype=torch.int64, device=layers[0].device)
    for cache, segment in zip(layers, out, strict=True):
        blocks = segment.view(len(block_ids), *layout.block_shape)
        if blocks.device == cache.device:
            torch.index_select(cache, 0, ids, out=blocks)
        else:
            blocks.copy_(cache.index_select(0, ids))


def scatter_latents(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """``kernels.paged.gather_scatter.scatter`` for ``LayoutKind.LATENT``; the arguments are already checked."""
    ids = torch.tensor(block_ids, dtype=torch.int64, device=layers[0].device)
    for cache, segment in zip(layers, src, strict=True):
        cache.index_copy_(0, ids, segment.to(cache.device).view(len(block_ids), *layout.block_shape))
