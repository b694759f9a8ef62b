"""What of requests is saved, and when: one interface, and the saves of a model of plain full attention.

Of such a model a request keeps all its blocks until it ends, so what a step has computed can be saved in a later one.
Other models free some of them sooner: their saves hold blocks from the step that fills them
(`deployments.engine.held_windows`, `deployments.engine.held_states`). On the engine thread.

Leans on vLLM's `KVCacheManager.get_block_ids`, `Request.block_hashes`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, cast

from deployments.engine.metrics import given_up_family
from deployments.engine.tracked_request import SaveLimits, TrackedRequest
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.kv_port import OfferedBlocks
from deployments.protocol.log_lines import names_request
from deployments.transfer.held_save import HeldSaves
from deployments.transfer.jobs import SaveJob
from deployments.transfer.layerwise_save import HostBuffer, StepProgress
from deployments.transfer.layerwise_step import LayerwiseStep
from kvmanager.loading.short_prompts import UNMEASURED_BLOCKS, RepeatedBlocks
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import cut_ends

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)


class WhyGivenUp(StrEnum):
    """Why blocks of a request that were held until they may be saved were let go, or not held at all."""

    SHARE = "share"
    """All that may be held is."""
    PREEMPTED = "preempted"
    """The request was preempted before it was saved."""
    ROOM = "room"
    """Another request needed the blocks."""


class GivenUp:
    """Counts the requests of which held blocks were given up, by reason; the log has the first of each."""

    def __init__(self, what: str) -> None:
        """``what`` is held."""
        self._what = what
        self.counts = {str(why): 0 for why in WhyGivenUp}

    def count(self, request_id: str, why: WhyGivenUp) -> None:
        """Count a request."""
        self.counts[why] += 1
        if self.counts[why] == 1:
            text = "%s of request %s were given up before they were saved, and are computed again (reason: %s; counted)"
            logger.warning(text, self._what, request_id, why)

    def families(self) -> Iterable[Metric]:
        """Return the metric."""
        return (given_up_family(self.counts),)


class RequestSaves(ABC):
    """Saves of one kind of model.

    The life of a request: `entered` → `planned` and `advanced`, once a step → `save_rest` → `left`.
    """

    @abstractmethod
    def entered(self, tracked: TrackedRequest, hints: EngineHints) -> None:
        """See what of a request that enters is worth keeping, and how much of it is stored already."""

    @abstractmethod
    def planned(self, tracked: TrackedRequest, computed_tokens: int, step_tokens: int, admitted: bool) -> None:
        """Look at the step that is being planned: `step_tokens` of a request, after the first `computed_tokens`.

        `admitted`: its blocks are others than in its last step. What lies before those tokens may then be KV that
        another request of this step is only about to compute.
        """

    @abstractmethod
    def advanced(self, tracked: TrackedRequest) -> None:
        """Save what steps that count have computed of a running request."""

    @abstractmethod
    def save_rest(self, tracked: TrackedRequest, end_block: int) -> int:
        """Save a request that ends, up to `end_block`; return the segments for which there is no room."""

    @abstractmethod
    def left(self, tracked: TrackedRequest) -> None:
        """Hold nothing of a request any more: it has ended."""

    @abstractmethod
    def make_room(self) -> None:
        """Let go of what only waits to be saved: a request needs blocks that no running one will free."""

    @property
    def held_blocks(self) -> int:
        """Device blocks that are held until they may be saved."""
        return 0

    def families(self) -> Iterable[Metric]:
        """Return metrics of the kind of model's own."""
        return ()


class DenseSaves(RequestSaves):
    """Saves a request's blocks, cut into segments by the manager: each once, held until they are copied."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        held_saves: HeldSaves,
        layerwise: LayerwiseStep,
        block_size: int,
        blocks_per_segment: int,
        group: int = 0,
    ) -> None:
        """`group`: of the model's layers, whose blocks are saved."""
        self._group = group
        self._kv_cache_manager = kv_cache_manager
        self._held_saves = held_saves
        self._transfer = held_saves.transfer
        self._layerwise = layerwise
        self._block_size = block_size
        self._blocks_per_segment = blocks_per_segment
        self._repeated = RepeatedBlocks()

    def entered(self, tracked: TrackedRequest, hints: EngineHints) -> None:
        """See `RequestSaves`."""
        request, loads = tracked.request, tracked.plan.loads
        least_tokens = hints.short_tokens or UNMEASURED_BLOCKS * self._block_size
        is_short = request.num_prompt_tokens < least_tokens
        repeated_blocks = self._repeated.met(request.block_hashes) if is_short else 0
        tracked.saving.limit(SaveLimits(least_tokens, repeated_blocks, hints.save_answer))
        if loads and not tracked.saving.is_never:
            end = loads[-1].end_block
            # Not under a tolerant prompt's exact names: under its own nothing is stored, and children need it.
            if (loads[-1].last_hash or loads[-1].key) == request.block_hashes[end - 1]:
                tracked.saving.reach(end)

    def advanced(self, tracked: TrackedRequest) -> None:
        """Save the prompt once it is computed, then every full segment."""
        computed = tracked.request.num_computed_tokens // self._block_size
        prompt = tracked.request.num_prompt_tokens // self._block_size
        end = computed - computed % self._blocks_per_segment
        if computed >= prompt:
            end = max(end, prompt)
        self.save(tracked, end)

    def planned(self, tracked: TrackedRequest, computed_tokens: int, step_tokens: int, admitted: bool) -> None:
        """Save, layer by layer, what the step computes of a prompt, if it counts: segments that it fills."""
        if not self._layerwise.saves or step_tokens < self._block_size:
            return
        if admitted and tracked.saving.blocks * self._block_size < computed_tokens:
            return
        end = (computed_tokens + step_tokens) // self._block_size
        prompt = tracked.request.num_prompt_tokens // self._block_size
        self.save(tracked, prompt if end >= prompt else end - end % self._blocks_per_segment, in_this_step=True)

    def save_rest(self, tracked: TrackedRequest, end_block: int) -> int:
        """See `RequestSaves`."""
        return self.save(tracked, end_block)

    def left(self, tracked: TrackedRequest) -> None:
        """See `RequestSaves`."""
        if tracked.saving.tail is not None:
            tracked.saving.tail.end()

    def make_room(self) -> None:
        """See `RequestSaves`."""
        self._transfer.drop_waiting_saves()

    @names_request
    def save(
        self,
        tracked: TrackedRequest,
        end_block: int,
        in_this_step: bool = False,
        on_stored: Callable[[int | None], None] = lambda stored: None,
        on_freed: Callable[[], None] = lambda: None,
    ) -> int:
        """Start saving up to `end_block`; returns the segments for which there is no room now, to try again.

        `in_this_step`: the step that is being planned computes them, and they are saved layer by layer. Where something
        is saved, `on_stored` is called when it can be planned, from any thread (None: it cannot), and `on_freed` on the
        engine thread when its blocks are held no more.
        """
        request, saving, limits = tracked.request, tracked.saving, tracked.saving.limits
        prompt_blocks = request.num_prompt_tokens // self._block_size
        if not limits.save_answer:
            end_block = min(end_block, prompt_blocks)
        end_block = min(end_block, len(request.block_hashes))
        if end_block * self._block_size < limits.least_tokens:
            end_block = min(end_block, limits.repeated_blocks)
        if end_block <= saving.blocks or request.mm_features:
            return 0
        first = saving.blocks
        ends = cut_ends(first, end_block, self._blocks_per_segment, prompt_blocks)
        wanted, room = len(ends), self._transfer.blocks_that_fit()
        ends = [end for end in ends if end - first <= room]
        if not ends:
            return wanted
        end = ends[-1]
        hashes = cast("list[BlockHash]", request.block_hashes[:end])
        offered = OfferedBlocks(hashes, first, end, prompt_blocks, tracked.owner.tenant)
        ids, tables = self._device_blocks(tracked, first, end)
        progress: StepProgress | None = None
        on_end = on_stored
        if in_this_step:
            starts = [first, *ends[:-1]]
            nbytes = sum(self._transfer.sealed_bytes(end - start) for start, end in zip(starts, ends, strict=True))
            buffer = self._layerwise.buffer
            if not buffer.take(nbytes):
                return wanted
            progress = self._layerwise.begin_save(request.request_id)
            on_end = partial(_give_back, buffer, nbytes)
        job = SaveJob(offered, ids, on_freed, tracked.owner.fidelity, on_end, progress, saving.tail, tables)
        if not self._held_saves.submit(job):
            on_end(None)
            return wanted
        saving.reach(end)
        self._submitted(tracked)
        return wanted - len(ends)

    def _device_blocks(
        self, tracked: TrackedRequest, first: int, end: int
    ) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
        """Return the device blocks of a request's blocks `first` to `end`: those of one group, and, if there are
        several groups, of each."""
        return self._kv_cache_manager.get_block_ids(tracked.request.request_id)[self._group][first:end], ()

    def _submitted(self, tracked: TrackedRequest) -> None:
        """A save holds the blocks before `tracked.saving.blocks` now."""


def _give_back(buffer: HostBuffer, nbytes: int, stored: int | None) -> None:
    buffer.give(nbytes)
