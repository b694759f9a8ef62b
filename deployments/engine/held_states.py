"""States of requests, held from the step that makes them until they may be saved. On the engine thread.

A block of a state group holds what the state was at the block's end, if a step ended there; a step later vLLM may free
it. So when a step that ends there is planned, the blocks of all state groups are held by reference count. Kept are the
states at places that another prompt may begin with: the last boundary that leaves a token of the prompt to compute, the
prompt's end, and a junction, where another prompt has parted from this one. Of all other boundaries only the last one
is kept: where the conversation may go on.

Leans on vLLM's `KVCacheManager`: `get_block_ids`, and `BlockPool`: `blocks`, `touch`, `free_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.engine.tracked_request import TrackedRequest
from deployments.transfer.segment_copy import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True)
class _StatesOfRequest:
    """What is held of a request."""

    kept: set[int]
    """Boundaries, in blocks, whose states are saved as soon as they count."""
    blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    """By boundary, of each group of the model one device block; null for a group without states."""


class HeldStates:
    """See the module's docstring. `groups`: those with states; `most_blocks`: device blocks that may be held."""

    def __init__(
        self, kv_cache_manager: KVCacheManager, groups: Sequence[int], block_size: int, most_blocks: int
    ) -> None:
        self._manager = kv_cache_manager
        self._groups = groups
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._held: dict[str, _StatesOfRequest] = {}
        self.blocks = 0
        """Device blocks that are held."""

    def planned(self, tracked: TrackedRequest, end_tokens: int, admitted: bool) -> None:
        """Hold a request's states at `end_tokens`, where the step that is being planned ends, if a block ends there.

        `admitted`: it has other blocks now than when it ran before, and what was held of those goes.
        """
        request = tracked.request
        if admitted:
            self.left(tracked)
        boundary, inside = divmod(end_tokens, self._block_size)
        if inside or tracked.is_never_saved or request.mm_features:
            return
        if end_tokens > request.num_prompt_tokens and not tracked.limits.save_answer:
            return
        tables = self._manager.get_block_ids(request.request_id)
        found = [[table[boundary - 1]] if group in self._groups else [NULL_BLOCK] for group, table in enumerate(tables)]
        if any(found[group] == [NULL_BLOCK] for group in self._groups):
            return
        held = self._held.get(request.request_id)
        if held is None:
            held = self._held[request.request_id] = _StatesOfRequest(self._kept(tracked))
        for old in set(held.blocks) - held.kept:
            self._free(held, old)
        if self.blocks + len(self._groups) > self._most_blocks:
            return
        held.blocks[boundary] = found
        self._manager.block_pool.touch(self._blocks_of(found))
        self.blocks += len(self._groups)

    def ready(self, tracked: TrackedRequest, end_block: int, all_of_them: bool = False) -> list[int]:
        """Return the boundaries up to `end_block` whose states are to be saved now, the last one first.

        `all_of_them`: the request ends, and goes on at the last one perhaps.
        """
        held = self._held.get(tracked.request.request_id)
        if held is None:
            return []
        found = (at for at in held.blocks if at <= end_block and (all_of_them or at in held.kept))
        return sorted(found, reverse=True)

    def tables(self, tracked: TrackedRequest, boundary: int) -> list[list[int]]:
        """Return, by group of the model, the device block of its state at a boundary that is held."""
        return self._held[tracked.request.request_id].blocks[boundary]

    def saved(self, tracked: TrackedRequest, boundary: int) -> None:
        """Let go of the states at a boundary: a save holds them now."""
        self._free(self._held[tracked.request.request_id], boundary)

    def left(self, tracked: TrackedRequest) -> None:
        """Let go of all that is held of a request: it has ended, or lost its blocks."""
        held = self._held.pop(tracked.request.request_id, None)
        if held is not None:
            for boundary in list(held.blocks):
                self._free(held, boundary)

    def make_room(self) -> None:
        """Let go of everything: a request needs blocks that no running one will free."""
        for held in self._held.values():
            for boundary in list(held.blocks):
                self._free(held, boundary)

    def _kept(self, tracked: TrackedRequest) -> set[int]:
        tokens = tracked.request.num_prompt_tokens
        return {(tokens - 1) // self._block_size, tokens // self._block_size, tracked.junction_block}

    def _blocks_of(self, found: Sequence[Sequence[int]]) -> list[KVCacheBlock]:
        blocks = self._manager.block_pool.blocks
        return [blocks[found[group][0]] for group in self._groups]

    def _free(self, held: _StatesOfRequest, boundary: int) -> None:
        self._manager.block_pool.free_blocks(self._blocks_of(held.blocks.pop(boundary)))
        self.blocks -= len(self._groups)
