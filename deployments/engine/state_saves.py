"""Saves of a model with states: its blocks up to a boundary, then the states there. On the engine thread.

Token KV behind the last stored states could not be loaded (`kvmanager.extensions.states`), so nothing is saved of it.
The states go as a segment of one block under a name of their own, after the blocks that they follow on: saves are
carried out in their order, and without those the manager refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from deployments.engine.held_states import HeldStates
from deployments.engine.request_saves import RequestSaves
from deployments.engine.tracked_request import TrackedRequest
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.kv_port import OfferedBlocks
from deployments.transfer.held_save import submit_held_save
from kvmanager.segments.keys import BlockHash, state_name

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from deployments.transfer.segment_copy import SegmentCopier
    from deployments.transfer.threads import KVTransfer


class StateSaves:
    """See the module's docstring. Takes the place of `RequestSaves`, by which it saves the blocks of tokens."""

    def __init__(
        self,
        tokens: RequestSaves,
        held: HeldStates,
        copier: SegmentCopier,
        transfer: KVTransfer,
        pool: BlockPool,
        on_engine_thread: Callable[[Callable[[], None]], Any],
        block_size: int,
    ) -> None:
        self._tokens, self._held, self._copier = tokens, held, copier
        self._transfer, self._pool, self._on_engine_thread = transfer, pool, on_engine_thread
        self._block_size = block_size

    def entered(self, tracked: TrackedRequest, hints: EngineHints) -> None:
        """See `RequestSaves.entered`."""
        self._tokens.entered(tracked, hints)

    def save_filled(self, tracked: TrackedRequest) -> None:
        """Save a running request up to where states are worth being kept, as far as they count."""
        computed = tracked.request.num_computed_tokens // self._block_size
        for boundary in self._held.ready(tracked, computed):
            self._save(tracked, boundary)

    def save(self, tracked: TrackedRequest, end_block: int) -> int:
        """Save a request that ends up to its last states; returns the segments for which there is no room."""
        return sum(self._save(tracked, boundary) for boundary in self._held.ready(tracked, end_block, all_of_them=True))

    def _save(self, tracked: TrackedRequest, boundary: int) -> int:
        left = self._tokens.save(tracked, boundary)
        if left:
            return left  # tried again in the next step, unless the request has ended
        request = tracked.request
        if tracked.is_never_saved or tracked.saved_blocks < boundary:
            return 0  # too short to be worth it yet: when more of it is saved, this is too
        hashes = cast("list[BlockHash]", request.block_hashes[:boundary])
        names = [*hashes, state_name(hashes[-1])]
        prompt = request.num_prompt_tokens // self._block_size
        in_prompt = len(names) if boundary <= prompt else prompt
        offered = OfferedBlocks(names, boundary, len(names), in_prompt, tracked.owner.tenant)
        tables = self._held.tables(tracked, boundary)
        started = submit_held_save(
            self._pool,
            self._transfer,
            self._on_engine_thread,
            offered,
            tables[self._copier.group_runs[0][1]],
            tracked.owner.fidelity,
            tables=tables,
            copier=self._copier,
        )
        if started:
            self._held.saved(tracked, boundary)
        return 0 if started else 1
