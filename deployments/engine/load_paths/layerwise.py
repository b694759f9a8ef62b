"""Layerwise: the segments of a whole load come layer by layer, while the step that they are for is computed.

The step waits before each layer for what it needs of it, so a load is proposed this way only where that is sooner, and
a load thread is idle: else the step would wait for the loads of others. What has not come when the step has been
computed goes back to vLLM to be recomputed; its blocks stay out of the prefix cache until then, as long as this path
keeps a state of the request (`deployments.engine.pool.hidden_blocks`). On the engine thread.

Leans on vLLM's `Scheduler`: `running`, `max_num_scheduled_tokens`, `kv_cache_manager.block_pool`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.engine.load_paths.base import LoadPath, Proposal
from deployments.engine.pool.hidden_blocks import hide_blocks, show_blocks
from deployments.engine.tracked_request import TrackedRequest
from deployments.transfer.jobs import LoadJob, load_parts

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from deployments.engine.load_paths.parts import EngineParts
    from deployments.engine.load_paths.whole import WholePath
    from deployments.transfer.layerwise_step import LayerwiseStep
    from deployments.transfer.threads import KVTransfer


@dataclass(frozen=True, slots=True)
class LayerwiseProposal(Proposal):
    """A load that the next step waits for, layer by layer."""

    timeout_s: float = 0.0
    """How long it may take."""


@dataclass(slots=True)
class HiddenBlocks:
    """Blocks of a failed load that no other request may find before they are computed."""

    blocks: Sequence[KVCacheBlock]
    first: int
    """Block of the sequence that the first of them is."""


class LayerwisePath(LoadPath):
    """See the module's docstring."""

    def __init__(
        self,
        whole: WholePath,
        step: LayerwiseStep,
        transfer: KVTransfer,
        pool: BlockPool,
        block_size: int,
        num_running: Callable[[], int],
        max_step_tokens: Callable[[], int],
    ) -> None:
        """`num_running`: requests in the engine's steps now; `max_step_tokens`: what the next one computes at most."""
        self._whole = whole
        self._step = step
        self._transfer = transfer
        self._pool = pool
        self._block_size = block_size
        self._num_running = num_running
        self._max_step_tokens = max_step_tokens

    def propose(self, request: TrackedRequest, first_block: int) -> Proposal | None:
        """See `LoadPath`. Where layers are no gain it is the whole load's own proposal."""
        whole = self._whole.propose(request, first_block)
        if whole is None or not self._transfer.has_idle_loader:
            return whole
        end, context = whole.end_block, whole.end_block * self._block_size
        timeout_s = self._step.choice.timeout_s(
            load_parts(request.plan.between(first_block, end), first_block, end),
            context,
            min(request.request.num_tokens - context, self._max_step_tokens()),
            self._num_running(),
            self._step.buffer.free_bytes,
            request.plan.within_s,
        )
        return whole if timeout_s is None else LayerwiseProposal(self, end, is_async=False, timeout_s=timeout_s)

    def start(
        self,
        request: TrackedRequest,
        block_ids: Sequence[int],
        proposal: Proposal,
        ended: Callable[[TrackedRequest, int], None],
    ) -> None:
        """See `LoadPath`."""
        assert isinstance(proposal, LayerwiseProposal)
        first, end = request.device_tokens // self._block_size, request.loading_upto_tokens // self._block_size
        loads = request.plan.between(first, end)
        job = LoadJob(request.request.request_id, request.plan.lease_id, loads, first, block_ids[first:end])
        blocks = hide_blocks(self._pool, block_ids[first:])

        def computed(arrived: int) -> None:
            self._show_arrived(request, first, arrived, blocks)
            ended(request, arrived * self._block_size)

        self._step.begin_load(job, proposal.timeout_s, computed)

    def admitted(self, request: TrackedRequest) -> None:
        """Forget the blocks of before a preemption."""
        del request.state[self]

    def advanced(self, request: TrackedRequest) -> None:
        """Let those hidden blocks that have been computed by now into the prefix cache."""
        hidden: HiddenBlocks = request.state[self]
        first = hidden.first
        end = min(request.request.num_computed_tokens // self._block_size, first + len(hidden.blocks))
        if end > first:
            show_blocks(self._pool, request.request, hidden.blocks, first, end, self._block_size)
            hidden.blocks, hidden.first = hidden.blocks[end - first :], end
        if not hidden.blocks:
            del request.state[self]

    def left(self, request: TrackedRequest) -> None:
        """See `LoadPath`."""
        if not request.is_loading:
            self.advanced(request)

    def _show_arrived(self, request: TrackedRequest, first: int, arrived: int, blocks: Sequence[KVCacheBlock]) -> None:
        """The blocks before block `arrived` of the sequence are there: let them into the prefix cache.

        If that is all of the load, the rest of the step counts too. Else the rest is recomputed.
        """
        end = arrived
        if arrived * self._block_size == request.loading_upto_tokens:
            end = first + len(blocks)
        elif end < first + len(blocks):
            request.state[self] = HiddenBlocks(blocks[end - first :], end)
        show_blocks(self._pool, request.request, blocks, first, end, self._block_size)


def build(parts: EngineParts) -> LayerwisePath:
    """Return the path of an engine."""
    scheduler = parts.scheduler
    return LayerwisePath(
        parts.whole,
        parts.layerwise,
        parts.transfer,
        scheduler.kv_cache_manager.block_pool,
        parts.block_size,
        lambda: len(scheduler.running),
        lambda: scheduler.max_num_scheduled_tokens,
    )
