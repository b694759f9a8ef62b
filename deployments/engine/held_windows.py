"""Saves of a model with windows: its blocks are held from the step that fills them until they may be saved.

vLLM frees a group's blocks behind its window when it plans the next step, which is before what a step has computed
counts and may be saved. So when a step is planned, the blocks that it fills are held by reference count. They go when a
save holds them itself, when the request ends, and when others need them (`make_room`).

At most a share of the pool is kept from others so. What a request has in any case does not count: while it is not
preempted, blocks of dense groups and those within a window. A request of which a block could not be held, or was let
go, is not saved further: a segment needs the KV of all layers, and the segments before it. Nor is one that was
preempted before its blocks could be saved: held again, they might have it preempted again.
On the engine thread.

Leans on vLLM's `KVCacheManager`: `get_block_ids`, and `BlockPool`: `blocks`, `touch`, `free_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from deployments.engine.groups import KVGroups
from deployments.engine.request_saves import DenseSaves, GivenUp, WhyGivenUp
from deployments.engine.tracked_request import TrackedRequest
from deployments.transfer.held_save import HeldSaves
from deployments.transfer.layerwise_step import LayerwiseStep
from deployments.transfer.segment_copy import NULL_BLOCK

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@dataclass(slots=True)
class _Held:
    """What is held of a request."""

    tracked: TrackedRequest
    blocks: dict[int, list[int]] = field(default_factory=dict)
    """By block of its sequence, the device block of each group; null where there was none."""
    end_tokens: int = 0
    """Where the step ends that filled the last of them."""


class HeldWindows:
    """See the module's docstring. `most_blocks`: device blocks that may be kept from others."""

    def __init__(self, kv_cache_manager: KVCacheManager, groups: KVGroups, block_size: int, most_blocks: int) -> None:
        self._manager = kv_cache_manager
        self._groups = groups
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._held: dict[str, _Held] = {}
        self.blocks = 0
        """Device blocks that are held."""
        self.given_up = GivenUp("windows")

    def planned(self, tracked: TrackedRequest, end_tokens: int, admitted: bool) -> None:
        """Hold what a request has up to `end_tokens`, where the step that is being planned ends.

        `admitted`: it has other blocks now than when it ran before.
        """
        if admitted and self._of(tracked):
            self._give_up(tracked, WhyGivenUp.PREEMPTED)
        if tracked.saving.is_never or tracked.request.mm_features:
            return
        if not tracked.saving.limits.save_answer:
            end_tokens = min(end_tokens, tracked.request.num_prompt_tokens)
        first = max(max(self._of(tracked), default=-1) + 1, tracked.saving.blocks)
        end = end_tokens // self._block_size
        if first >= end:
            return
        of_request = self._held.setdefault(tracked.request.request_id, _Held(tracked))
        held = of_request.blocks
        tables = self._manager.get_block_ids(tracked.request.request_id)
        pool = self._manager.block_pool
        for block in range(first, end):
            held[block] = [table[block] for table in tables]
            here = [pool.blocks[each] for each in held[block] if each != NULL_BLOCK]
            pool.touch(here)
            self.blocks += len(here)
        of_request.end_tokens = end_tokens
        # No more is kept from others than is held, which is known without a look at each block.
        if self.blocks > self._most_blocks < sum(map(self._kept_from_others, self._held.values())):
            self._give_up(tracked, WhyGivenUp.SHARE)

    def tables(self, tracked: TrackedRequest, first: int, end: int) -> list[list[int]]:
        """Return, by group, the device blocks of a request's blocks `first` to `end`; null where none is held."""
        held = self._of(tracked)
        nothing = [NULL_BLOCK] * len(self._groups.windows)
        return [list(table) for table in zip(*(held.get(block, nothing) for block in range(first, end)), strict=True)]

    def saved(self, tracked: TrackedRequest) -> None:
        """Let go of what a save holds now."""
        held = self._of(tracked)
        self._free(held, [block for block in held if block < tracked.saving.blocks])

    def left(self, tracked: TrackedRequest) -> None:
        """Let go of all that is held of a request: it has ended, or lost its blocks."""
        held = self._of(tracked)
        self._free(held, list(held))
        self._held.pop(tracked.request.request_id, None)

    def make_room(self) -> None:
        """Let go of everything: a request needs blocks that no running one will free."""
        for held in list(self._held.values()):
            if held.blocks:
                self._give_up(held.tracked, WhyGivenUp.ROOM)

    def _kept_from_others(self, held: _Held) -> int:
        """Count the device blocks that vLLM frees of this request with its next step, or has freed."""
        preempted = held.tracked.request.status is RequestStatus.PREEMPTED
        count = 0
        for group, window in enumerate(self._groups.windows):
            in_use = held.end_tokens if window is None else min(held.end_tokens, window - 1)
            behind = (held.end_tokens - (0 if preempted else in_use)) // self._block_size
            count += sum(ids[group] != NULL_BLOCK for block, ids in held.blocks.items() if block < behind)
        return count

    def _of(self, tracked: TrackedRequest) -> dict[int, list[int]]:
        held = self._held.get(tracked.request.request_id)
        return {} if held is None else held.blocks

    def _give_up(self, tracked: TrackedRequest, why: WhyGivenUp) -> None:
        self.given_up.count(tracked.request.request_id, why)
        self.left(tracked)
        tracked.saving.never()

    def _free(self, held: dict[int, list[int]], blocks: list[int]) -> None:
        pool = self._manager.block_pool
        for block in reversed(blocks):
            here = [pool.blocks[each] for each in held.pop(block) if each != NULL_BLOCK]
            pool.free_blocks(here)
            self.blocks -= len(here)


class WindowSaves(DenseSaves):
    """Saves the blocks of all groups of a model with windows. `held`: those that may not be saved yet."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        held_saves: HeldSaves,
        layerwise: LayerwiseStep,
        block_size: int,
        blocks_per_segment: int,
        held: HeldWindows,
    ) -> None:
        super().__init__(kv_cache_manager, held_saves, layerwise, block_size, blocks_per_segment)
        self._held = held

    def planned(self, tracked: TrackedRequest, computed_tokens: int, step_tokens: int, admitted: bool) -> None:
        """Hold what the step fills."""
        self._held.planned(tracked, computed_tokens + step_tokens, admitted)

    def left(self, tracked: TrackedRequest) -> None:
        """See `RequestSaves`."""
        self._held.left(tracked)
        super().left(tracked)

    def make_room(self) -> None:
        """See `RequestSaves`."""
        self._held.make_room()
        super().make_room()

    @property
    def held_blocks(self) -> int:
        """See `RequestSaves`."""
        return self._held.blocks

    def families(self) -> Iterable[Metric]:
        """See `RequestSaves`."""
        return self._held.given_up.families()

    def _device_blocks(
        self, tracked: TrackedRequest, first: int, end: int
    ) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
        tables = self._held.tables(tracked, first, end)
        return tables[0], tables

    def _submitted(self, tracked: TrackedRequest) -> None:
        self._held.saved(tracked)
