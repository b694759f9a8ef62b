"""vLLM's KV events, turned into placement reports: which block hashes are in the device pool now.

Leans on vllm 0.32.0: `Scheduler.kv_event_publisher` (replaced in process, no socket), `BlockStored`, `BlockRemoved`,
`AllBlocksCleared`, and on VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, which keeps the hashes whole (32 bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from deployments.kv_port import KVPort


class PlacementPublisher:
    """Stands in for vLLM's event publisher. Called on the engine thread after each step that changed the pool."""

    def __init__(self, port: KVPort, in_pool: Callable[[bytes], bool]) -> None:
        self._port = port
        self._in_pool = in_pool

    def publish(self, batch: Any) -> None:
        """Report one step's events as one change: what is in the pool at its end, and what is not.

        The pool may hold one hash in several blocks and tells of each that goes, so the pool itself has the last word.
        """
        touched: dict[bytes, None] = {}
        cleared = False
        for event in batch.events:
            if isinstance(event, BlockStored | BlockRemoved):
                touched.update((_whole(block_hash), None) for block_hash in event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                cleared = True
        if touched or cleared:
            stored: list[bytes] = []
            removed: list[bytes] = []
            for block_hash in touched:
                (stored if self._in_pool(block_hash) else removed).append(block_hash)
            self._port.report_placement(stored, removed, cleared)

    def shutdown(self) -> None:
        """Nothing to close."""


def _whole(block_hash: Any) -> bytes:
    if not isinstance(block_hash, bytes):
        raise TypeError("set VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 before vLLM starts: block hashes must be whole")
    return block_hash
