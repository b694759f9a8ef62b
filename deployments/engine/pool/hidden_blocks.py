"""Blocks that no other request may use yet: their KV is being loaded by the very step that computes their request.

Leans on vLLM's `BlockPool`: `evict_blocks`, `cache_full_blocks`.

vLLM lets a request's blocks into its prefix cache when it allocates them, also those that a synchronous load fills and
those computed from them. If the load fails, vLLM recomputes them. Until then, or for ever if the request is aborted
meanwhile, a request that finds them in the prefix cache would use KV that is not there. So they are taken out of it as
soon as they are allocated, and let in when the step has been computed: all of them if the whole load was there, else
those that were, and the others once they have been recomputed. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


def hide_blocks(pool: BlockPool, block_ids: Sequence[int]) -> list[KVCacheBlock]:
    """Take consecutive blocks that were allocated just now out of the prefix cache; returns those that were in it.

    They are the first ones. vLLM lets the others in by itself when a later step fills them, and refuses to do so twice.
    """
    blocks = [pool.blocks[block_id] for block_id in block_ids]
    shared = [block for block in blocks if block.block_hash is not None]
    pool.evict_blocks({block.block_id for block in shared})
    return shared


def show_blocks(
    pool: BlockPool, request: Request, blocks: Sequence[KVCacheBlock], first: int, end: int, block_size: int
) -> None:
    """Let blocks `first` to `end` of a request into the prefix cache; `blocks` are its hidden ones, from `first` on."""
    if end > first:
        before = [pool.null_block] * first  # cache_full_blocks looks only at those from `first` on
        pool.cache_full_blocks(request, [*before, *blocks], first, end, block_size, kv_cache_group_id=0)
