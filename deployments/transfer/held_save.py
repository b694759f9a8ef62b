"""Saves of device blocks that are held by reference count until they have been copied. On the engine thread.

`after_saves` tells when those before it have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deployments.protocol.kv_port import OfferedBlocks
from deployments.transfer.segment_copy import NULL_BLOCK
from deployments.transfer.threads import KVTransfer, SaveJob
from kvmanager.segments.format import EXACT

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_NO_BLOCKS = OfferedBlocks([], 0, 0, 0, "")


def after_saves(transfer: KVTransfer, call: Callable[[], None]) -> bool:
    """Have `call` called when all saves that were submitted so far have ended, or are dropped. From any thread.

    It is called from the save thread, and must not block or raise. False: it will not be called, for a tier hangs.
    """
    return transfer.submit_save(SaveJob(_NO_BLOCKS, (), lambda: None, EXACT, lambda stored: call()))


class HeldSaves:
    """See the module's docstring. `on_engine_thread` runs a function between two steps; from any thread."""

    def __init__(
        self, pool: BlockPool, transfer: KVTransfer, on_engine_thread: Callable[[Callable[[], None]], Any]
    ) -> None:
        self.transfer = transfer
        self._pool, self._on_engine_thread = pool, on_engine_thread

    def submit(self, job: SaveJob) -> bool:
        """Hold a job's blocks and start saving them; False: too many are held already.

        `job.give_back` is called on the engine thread, when they are held no more, whatever the answer.
        """
        ids = [block_id for table in job.tables or (job.block_ids,) for block_id in table]
        held = [self._pool.blocks[block_id] for block_id in ids if block_id != NULL_BLOCK]

        def free() -> None:
            self._pool.free_blocks(reversed(held))
            job.give_back()

        self._pool.touch(held)
        if self.transfer.submit_save(replace(job, give_back=lambda: self._on_engine_thread(free))):
            return True
        free()
        return False
