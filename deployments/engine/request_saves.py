"""Saves a request's blocks, cut into segments by the manager: each once, held by reference count until they are copied.

Leans on vLLM's `KVCacheManager.get_block_ids`, `Request.block_hashes`. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from deployments.engine.held_windows import HeldWindows
from deployments.engine.tracked_request import SaveLimits, TrackedRequest
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.kv_port import OfferedBlocks
from deployments.protocol.log_lines import names_request
from deployments.transfer.held_save import submit_held_save
from deployments.transfer.layerwise_save import HostBuffer, StepProgress
from deployments.transfer.layerwise_step import LayerwiseStep
from deployments.transfer.threads import KVTransfer
from kvmanager.loading.short_prompts import UNMEASURED_BLOCKS, RepeatedBlocks
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import cut_ends

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class RequestSaves:
    """See the module's docstring. `on_engine_thread` runs a function between two steps; from any thread."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        transfer: KVTransfer,
        layerwise: LayerwiseStep,
        on_engine_thread: Callable[[Callable[[], None]], Any],
        block_size: int,
        blocks_per_segment: int,
        windows: HeldWindows | None = None,
        group: int = 0,
    ) -> None:
        """`windows`: of a model whose layers do not all attend to everything; of others `group` is saved."""
        self._group = group
        self._windows = windows
        self._kv_cache_manager = kv_cache_manager
        self._transfer = transfer
        self._layerwise = layerwise
        self._on_engine_thread = on_engine_thread
        self._block_size = block_size
        self._blocks_per_segment = blocks_per_segment
        self._repeated = RepeatedBlocks()

    def entered(self, tracked: TrackedRequest, hints: EngineHints) -> None:
        """A request has entered: see what of it is worth keeping, and how much of it is stored already."""
        request, loads = tracked.request, tracked.loads
        least_tokens = hints.short_tokens or UNMEASURED_BLOCKS * self._block_size
        is_short = request.num_prompt_tokens < least_tokens
        repeated_blocks = self._repeated.met(request.block_hashes) if is_short else 0
        tracked.limits = SaveLimits(least_tokens, repeated_blocks, hints.save_answer)
        if loads and not tracked.is_never_saved:
            end = loads[-1].end_block
            # Not under a tolerant prompt's exact names: under its own nothing is stored, and children need it.
            if (loads[-1].last_hash or loads[-1].key) == request.block_hashes[end - 1]:
                tracked.saved_blocks = end

    def save_filled(self, tracked: TrackedRequest) -> None:
        """Save what a running request has filled so far: its prompt once it is computed, then every full segment."""
        computed = tracked.request.num_computed_tokens // self._block_size
        prompt = tracked.request.num_prompt_tokens // self._block_size
        end = computed - computed % self._blocks_per_segment
        if computed >= prompt:
            end = max(end, prompt)
        self.save(tracked, end)

    def save_step(self, tracked: TrackedRequest, computed_tokens: int, step_tokens: int, admitted: bool) -> None:
        """Save, layer by layer, what the step that is being planned computes of a prompt: segments that it fills.

        The step computes `step_tokens` tokens after the first `computed_tokens`. In the step that admits a request,
        what lies before those may be KV that another request is only about to compute: not saved yet.
        """
        if not self._layerwise.saves or step_tokens < self._block_size:
            return
        if admitted and tracked.saved_blocks * self._block_size < computed_tokens:
            return
        end = (computed_tokens + step_tokens) // self._block_size
        prompt = tracked.request.num_prompt_tokens // self._block_size
        self.save(tracked, prompt if end >= prompt else end - end % self._blocks_per_segment, in_this_step=True)

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
        request, limits = tracked.request, tracked.limits
        prompt_blocks = request.num_prompt_tokens // self._block_size
        if not limits.save_answer:
            end_block = min(end_block, prompt_blocks)
        end_block = min(end_block, len(request.block_hashes))
        if end_block * self._block_size < limits.least_tokens:
            end_block = min(end_block, limits.repeated_blocks)
        if end_block <= tracked.saved_blocks or request.mm_features:
            return 0
        first = tracked.saved_blocks
        ends = cut_ends(first, end_block, self._blocks_per_segment, prompt_blocks)
        wanted, room = len(ends), self._transfer.blocks_that_fit()
        ends = [end for end in ends if end - first <= room]
        if not ends:
            return wanted
        end = ends[-1]
        hashes = cast("list[BlockHash]", request.block_hashes[:end])
        offered = OfferedBlocks(hashes, first, end, prompt_blocks, tracked.owner.tenant)
        tables: list[list[int]] = []
        if self._windows is not None:
            tables = self._windows.tables(tracked, first, end)
            ids = tables[0]
        else:
            ids = list(self._kv_cache_manager.get_block_ids(request.request_id)[self._group][first:end])
        pace: StepProgress | None = None
        on_end = on_stored
        if in_this_step:
            starts = [first, *ends[:-1]]
            nbytes = sum(self._transfer.sealed_bytes(end - start) for start, end in zip(starts, ends, strict=True))
            buffer = self._layerwise.buffer
            if not buffer.take(nbytes):
                return wanted
            pace = self._layerwise.begin_save(request.request_id)
            on_end = partial(_give_back, buffer, nbytes)
        pool = self._kv_cache_manager.block_pool
        if not submit_held_save(
            pool,
            self._transfer,
            self._on_engine_thread,
            offered,
            ids,
            tracked.owner.fidelity,
            on_end,
            pace,
            tracked.tail,
            on_freed,
            tables,
        ):
            on_end(None)
            return wanted
        tracked.saved_blocks = end
        if self._windows is not None:
            self._windows.saved(tracked)
        return wanted - len(ends)


def _give_back(buffer: HostBuffer, nbytes: int, stored: int | None) -> None:
    buffer.give(nbytes)
