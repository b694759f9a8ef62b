"""Saves of a model with states, which are held from the step that makes them until they may be saved.

A block of a state group holds what the state was at the block's end, if a step ended there; a step later vLLM may free
it. So when a step that ends there is planned, the blocks of all state groups are held by reference count. Kept are the
states at places that another prompt may begin with: the last boundary that leaves a token of the prompt to compute, the
prompt's end, and the one that its plan names: where another prompt has parted from this one, or may. Of all other
boundaries only the last one is kept: where the conversation may go on.

What is saved of a request ends at a boundary whose states are saved too: token KV behind them could not be loaded
(`kvmanager.extensions.states`). The states go as a segment of one block under a name of their own, after the blocks
that they follow on: saves are carried out in their order, and without those the manager refuses them. On the engine
thread.

Leans on vLLM's `KVCacheManager`: `get_block_ids`, and `BlockPool`: `blocks`, `touch`, `free_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from deployments.engine.request_saves import DenseSaves, GivenUp, RequestSaves, WhyGivenUp
from deployments.engine.tracked_request import TrackedRequest
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.kv_port import OfferedBlocks
from deployments.transfer.held_save import HeldSaves
from deployments.transfer.jobs import SaveJob
from deployments.transfer.segment_copy import NULL_BLOCK
from kvmanager.segments.keys import BlockHash, state_name

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from deployments.transfer.segment_copy import SegmentCopier


@dataclass(slots=True)
class _StatesOfRequest:
    """What is held of a request."""

    kept: set[int]
    """Boundaries, in blocks, whose states are saved as soon as they count."""
    blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    """By boundary, of each group of the model one device block; null for a group without states."""
    lacks_some: bool = False
    """Whether states of it were not held, for all that may be was."""


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
        self.given_up = GivenUp("states")

    def planned(self, tracked: TrackedRequest, end_tokens: int, admitted: bool) -> None:
        """Hold a request's states at `end_tokens`, where the step that is being planned ends, if a block ends there.

        `admitted`: it has other blocks now than when it ran before, and what was held of those goes.
        """
        request = tracked.request
        if admitted:
            self._give_up(request.request_id, WhyGivenUp.PREEMPTED)
            self.left(tracked)
        boundary, inside = divmod(end_tokens, self._block_size)
        if inside or tracked.saving.is_never or request.mm_features:
            return
        if end_tokens > request.num_prompt_tokens and not tracked.saving.limits.save_answer:
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
            if not held.lacks_some:
                held.lacks_some = True
                self.given_up.count(request.request_id, WhyGivenUp.SHARE)
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
        for request_id in self._held:
            self._give_up(request_id, WhyGivenUp.ROOM)

    def _give_up(self, request_id: str, why: WhyGivenUp) -> None:
        """Let go of what is held of a request, if anything is."""
        held = self._held.get(request_id)
        if held is None or not held.blocks:
            return
        self.given_up.count(request_id, why)
        for boundary in list(held.blocks):
            self._free(held, boundary)

    def _kept(self, tracked: TrackedRequest) -> set[int]:
        tokens = tracked.request.num_prompt_tokens
        return {(tokens - 1) // self._block_size, tokens // self._block_size, tracked.saving.kept_boundary}

    def _blocks_of(self, found: Sequence[Sequence[int]]) -> list[KVCacheBlock]:
        blocks = self._manager.block_pool.blocks
        return [blocks[found[group][0]] for group in self._groups]

    def _free(self, held: _StatesOfRequest, boundary: int) -> None:
        self._manager.block_pool.free_blocks(self._blocks_of(held.blocks.pop(boundary)))
        self.blocks -= len(self._groups)


class StateSaves(RequestSaves):
    """Saves the blocks of tokens by `tokens`, up to a boundary, and then the states there, which `copier` copies."""

    def __init__(
        self, tokens: DenseSaves, held: HeldStates, copier: SegmentCopier, held_saves: HeldSaves, block_size: int
    ) -> None:
        self._tokens, self._held, self._copier, self._held_saves = tokens, held, copier, held_saves
        self._block_size = block_size

    def entered(self, tracked: TrackedRequest, hints: EngineHints) -> None:
        """See `RequestSaves`."""
        self._tokens.entered(tracked, hints)

    def planned(self, tracked: TrackedRequest, computed_tokens: int, step_tokens: int, admitted: bool) -> None:
        """Hold the states that the step makes."""
        self._held.planned(tracked, computed_tokens + step_tokens, admitted)

    def advanced(self, tracked: TrackedRequest) -> None:
        """Save up to where states are worth being kept."""
        computed = tracked.request.num_computed_tokens // self._block_size
        for boundary in self._held.ready(tracked, computed):
            self._save(tracked, boundary)

    def save_rest(self, tracked: TrackedRequest, end_block: int) -> int:
        """Save up to the last states."""
        return sum(self._save(tracked, boundary) for boundary in self._held.ready(tracked, end_block, all_of_them=True))

    def left(self, tracked: TrackedRequest) -> None:
        """See `RequestSaves`."""
        self._held.left(tracked)
        self._tokens.left(tracked)

    def make_room(self) -> None:
        """See `RequestSaves`."""
        self._held.make_room()
        self._tokens.make_room()

    @property
    def held_blocks(self) -> int:
        """See `RequestSaves`."""
        return self._held.blocks

    def families(self) -> Iterable[Metric]:
        """See `RequestSaves`."""
        return self._held.given_up.families()

    def _save(self, tracked: TrackedRequest, boundary: int) -> int:
        left = self._tokens.save(tracked, boundary)
        if left:
            return left  # tried again in the next step, unless the request has ended
        request = tracked.request
        if tracked.saving.is_never or tracked.saving.blocks < boundary:
            return 0  # too short to be worth it yet: when more of it is saved, this is too
        hashes = cast("list[BlockHash]", request.block_hashes[:boundary])
        names = [*hashes, state_name(hashes[-1])]
        prompt = request.num_prompt_tokens // self._block_size
        in_prompt = len(names) if boundary <= prompt else prompt
        offered = OfferedBlocks(names, boundary, len(names), in_prompt, tracked.owner.tenant)
        tables = self._held.tables(tracked, boundary)
        ids = tables[self._copier.group_runs[0][1]]
        job = SaveJob(offered, ids, lambda: None, tracked.owner.fidelity, tables=tables, copier=self._copier)
        if not self._held_saves.submit(job):
            return 1
        self._held.saved(tracked, boundary)
        return 0
