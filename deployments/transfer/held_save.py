"""A save of device blocks that are held by reference count until they have been copied. On the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deployments.transfer.layerwise_save import StepProgress
from deployments.transfer.threads import KVTransfer, SaveJob
from kvmanager.segments.format import EXACT
from kvmanager.segments.spans import SegmentSpan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


def submit_held_save(
    pool: BlockPool,
    transfer: KVTransfer,
    on_engine_thread: Callable[[Callable[[], None]], Any],
    spans: Sequence[SegmentSpan],
    block_ids: Sequence[Sequence[int]],
    on_end: Callable[[int | None], None] = lambda stored: None,
    fidelity: str = EXACT,
    pace: StepProgress | None = None,
) -> bool:
    """Hold the blocks of `spans` (`SaveJob` has the shapes) and start saving them; False: too many are held already."""
    held = [pool.blocks[block_id] for segment in block_ids for block_id in segment]

    def free() -> None:
        pool.free_blocks(reversed(held))

    pool.touch(held)
    if transfer.submit_save(SaveJob(spans, block_ids, lambda: on_engine_thread(free), on_end, fidelity, pace)):
        return True
    free()
    return False
