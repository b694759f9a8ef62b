"""vLLM's KV events, turned into placement reports: which block hashes are in the device pool now.

Leans on vLLM: `Scheduler.kv_event_publisher` (replaced in process, no socket), `BlockStored`, `BlockRemoved`,
`AllBlocksCleared` (`group_idx`: None of what we let in ourselves), and on VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, which
keeps the hashes whole (32 bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from deployments.engine.pool.block_owners import NO_OWNER, BlockOwners, Owner
from deployments.protocol.kv_port import KVPort


class PlacementPublisher:
    """Stands in for vLLM's event publisher. Called on the engine thread after each step that changed the pool.

    `parents` tells, for each block hash in the pool, the hash of the block before it (None for a sequence's first),
    which vLLM's pool does not remember; `owners`, whose they are. `on_cleared` is called when vLLM has emptied its
    prefix cache.
    """

    def __init__(
        self,
        port: KVPort,
        in_pool: Callable[[bytes], bool],
        on_cleared: Callable[[], None] = lambda: None,
        find_owner: Callable[[bytes], Owner] = lambda block_hash: NO_OWNER,
        group: int = 0,
    ) -> None:
        """`find_owner`: the owner of the running request that has a block. `group`: of layers, whose blocks count."""
        self._group = group
        self.parents: dict[bytes, bytes | None] = {}
        self.owners = BlockOwners(find_owner)
        self._port = port
        self._in_pool = in_pool
        self._on_cleared = on_cleared

    def publish(self, batch: Any) -> None:
        """Report one step's events as one change: what is in the pool at its end, and what is not.

        The pool may hold one hash in several blocks and tells of each that goes, so the pool itself has the last word.
        """
        touched: dict[bytes, None] = {}
        cleared = False
        for event in batch.events:
            if isinstance(event, BlockStored | BlockRemoved) and event.group_idx not in (None, self._group):
                continue
            if isinstance(event, BlockStored | BlockRemoved):
                touched.update((_whole(block_hash), None) for block_hash in event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                cleared = True
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                before = None if parent is None else _whole(parent)
                self.owners.stored([_whole(block_hash) for block_hash in event.block_hashes], before)
                for block_hash in event.block_hashes:
                    self.parents[_whole(block_hash)] = before
                    before = _whole(block_hash)
        if cleared:
            self._on_cleared()
        if touched or cleared:
            stored: list[bytes] = []
            removed: list[bytes] = []
            for block_hash in touched:
                (stored if self._in_pool(block_hash) else removed).append(block_hash)
            for block_hash in list(self.parents) if cleared else removed:
                if not self._in_pool(block_hash):
                    self.parents.pop(block_hash, None)
                    self.owners.removed(block_hash)
            self._port.report_placement(stored, removed, cleared)

    def shutdown(self) -> None:
        """Nothing to close."""


def _whole(block_hash: Any) -> bytes:
    if not isinstance(block_hash, bytes):
        raise TypeError("set VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 before vLLM starts: block hashes must be whole")
    return block_hash
