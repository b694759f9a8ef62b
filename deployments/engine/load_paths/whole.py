"""Whole: planned segments that follow what the device has are loaded together, before the request runs.

The way that everything else can fall back to, and that is enough for an exact engine. On the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from deployments.engine.load_paths.base import LoadPath, Proposal
from deployments.engine.tracked_request import TrackedRequest
from deployments.transfer.load_pace import load_pace
from deployments.transfer.threads import KVTransfer, LoadJob


class WholePath(LoadPath):
    """See the module's docstring."""

    def __init__(
        self,
        transfer: KVTransfer,
        block_size: int,
        load_deadline_s: float,
        ttft_target_s: float | None = None,
        has_windows: bool = False,
    ) -> None:
        """`ttft_target_s`: from its arrival, of a tolerant prompt; None: there is no target.

        `has_windows`: the device keeps a window only at a boundary, without which the next such prompt loads again.
        """
        self._transfer = transfer
        self._block_size = block_size
        self._load_deadline_s = load_deadline_s
        self._ttft_target_s = ttft_target_s
        self._has_windows = has_windows

    def propose(self, request: TrackedRequest, first_block: int) -> Proposal | None:
        """See `LoadPath`."""
        if request.wait.was_in_vain:
            request.give_plan_up(first_block)
        end = request.loadable_end(first_block, self._block_size)
        return Proposal(self, end, boundary_block=end if self._has_windows else 0) if end > first_block else None

    def start(
        self,
        request: TrackedRequest,
        block_ids: Sequence[int],
        proposal: Proposal,
        ended: Callable[[TrackedRequest, int], None],
    ) -> None:
        """See `LoadPath`."""
        job, give_up_at = self.job(request, block_ids)
        self._transfer.submit_load(job, give_up_at)

    def job(self, request: TrackedRequest, block_ids: Sequence[int]) -> tuple[LoadJob, float]:
        """Return the load of all that was proposed, and until when it pays, on `time.monotonic`'s clock.

        Of a model with windows a part would be of no use, so such a load is not ended early.
        """
        block = self._block_size
        first, end = request.device_tokens // block, request.loading_upto_tokens // block
        loads = request.plan.between(first, end)
        pace = None
        if not request.tables:
            pace = load_pace(request.request, loads, first, end, block, self._ttft_target_s, self._load_deadline_s)
        job = LoadJob(
            request.request.request_id,
            request.plan.lease_id,
            loads,
            first,
            block_ids[first:end],
            pace=pace,
            within_s=request.plan.within_s,
            tables=[table[first:end] for table in request.tables],
        )
        return job, pace.give_up_at if pace else math.inf
