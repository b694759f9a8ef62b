"""Paged gather and scatter, said as plainly as torch can: what the fast versions are held to.

One Python step per layer and block; arguments as in ``kernels.paged.gather_scatter``, unchecked.
"""

from collections.abc import Sequence

import torch

from kernels.paged.layout import LayoutKind, PagedLayout


def gather_reference(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, out: torch.Tensor
) -> None:
    """Read blocks into the segment ``out``, ``[layer, k|v, token, kv_head, head_dim]``."""
    for layer, cache in enumerate(layers):
        for position, block_id in enumerate(block_ids):
            tokens = slice(position * layout.block_size, (position + 1) * layout.block_size)
            for kv, view in enumerate(_as_token_head_dim(cache[block_id], layout)):
                out[layer, kv, tokens] = view.reshape(layout.block_size, layout.num_kv_heads, layout.head_dim)


def scatter_reference(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int], layout: PagedLayout, src: torch.Tensor
) -> None:
    """Write the segment ``src``, ``[layer, k|v, token, kv_head, head_dim]``, into blocks."""
    for layer, cache in enumerate(layers):
        for position, block_id in enumerate(block_ids):
            tokens = slice(position * layout.block_size, (position + 1) * layout.block_size)
            for kv, view in enumerate(_as_token_head_dim(cache[block_id], layout)):
                view.copy_(src[layer, kv, tokens].reshape(view.shape))


def _as_token_head_dim(block: torch.Tensor, layout: PagedLayout) -> tuple[torch.Tensor, ...]:
    """Views of a block's halves (K and V, or its latents) whose row-major order is ``[token, kv_head, head_dim]``.

    ``block`` has ``layout.block_shape``. Tiled layouts split token or dim over several dimensions.
    """
    heads, tokens, dims = layout.num_kv_heads, layout.block_size, layout.head_dim
    match layout.kind:
        case LayoutKind.CPU_VEC:
            regions = block.view(heads, 2, tokens * dims)
            k = regions[:, 0].view(heads, dims, tokens).permute(2, 0, 1)
            v = regions[:, 1].view(heads, tokens, dims).permute(1, 0, 2)
        case LayoutKind.CPU_AMX:
            regions = block.view(heads, 2, tokens * dims)
            k = regions[:, 0].view(heads, tokens // 16, dims // 2, 16, 2).permute(1, 3, 0, 2, 4)
            v = regions[:, 1].view(heads, dims // 16, tokens // 2, 16, 2).permute(2, 4, 0, 1, 3)
        case LayoutKind.CUDA_FLASH:
            k = block[..., :dims].permute(1, 0, 2)
            v = block[..., dims:].permute(1, 0, 2)
        case LayoutKind.LATENT:
            return (block.permute(1, 0, 2),)
        case LayoutKind.OPAQUE:
            k, v = block.view(2, tokens, heads, dims)
    return k, v
