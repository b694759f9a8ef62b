"""A save of device blocks that are held by reference count until they have been copied. On the engine thread.

`after_saves` tells when those before it have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deployments.protocol.kv_port import OfferedBlocks
from deployments.transfer.jobs import SegmentTail
from deployments.transfer.layerwise_save import StepProgress
from deployments.transfer.segment_copy import NULL_BLOCK
from deployments.transfer.threads import KVTransfer, SaveJob
from kvmanager.segments.format import EXACT

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from deployments.transfer.segment_copy import SegmentCopier


_NO_BLOCKS = OfferedBlocks([], 0, 0, 0, "")


def after_saves(transfer: KVTransfer, call: Callable[[], None]) -> bool:
    """Have `call` called when all saves that were submitted so far have ended, or are dropped. From any thread.

    It is called from the save thread, and must not block or raise. False: it will not be called, for a tier hangs.
    """
    return transfer.submit_save(SaveJob(_NO_BLOCKS, (), lambda: None, EXACT, lambda stored: call()))


def submit_held_save(
    pool: BlockPool,
    transfer: KVTransfer,
    on_engine_thread: Callable[[Callable[[], None]], Any],
    offered: OfferedBlocks,
    block_ids: Sequence[int],
    fidelity: str,
    on_end: Callable[[int | None], None] = lambda stored: None,
    pace: StepProgress | None = None,
    tail: SegmentTail | None = None,
    on_freed: Callable[[], None] = lambda: None,
    tables: Sequence[Sequence[int]] = (),
    copier: SegmentCopier | None = None,
) -> bool:
    """Hold blocks (`SaveJob` has the shapes) and start saving them; False: too many are held already.

    `fidelity`: of the names that they are stored under.
    `on_freed`: called on the engine thread when they are held no more.
    """
    ids = [block_id for table in tables or (block_ids,) for block_id in table]
    held = [pool.blocks[block_id] for block_id in ids if block_id != NULL_BLOCK]

    def free() -> None:
        pool.free_blocks(reversed(held))
        on_freed()

    job = SaveJob(offered, block_ids, lambda: on_engine_thread(free), fidelity, on_end, pace, tail, tables, copier)
    pool.touch(held)
    if transfer.submit_save(job):
        return True
    free()
    return False
