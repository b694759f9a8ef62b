"""Whole: planned segments that follow what the device has are loaded together, before the request runs.

The way that everything else can fall back to, and that is enough for an exact engine. A load is waited for as long as
it pays, and so that a tolerant prompt holds `kv.ttft_target_s`: all times are on `time.monotonic`'s clock, so a step of
the machine's clock moves nothing. On the engine thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deployments.engine.load_paths.base import LoadPath, Proposal
from deployments.engine.tracked_request import TrackedRequest
from deployments.protocol.engine_hints import hints_of
from deployments.transfer.jobs import load_parts
from deployments.transfer.threads import KVTransfer, LoadJob
from kvmanager.loading.prefix_load import LoadedSegment, PrefixLoad
from kvmanager.moves.plan import NOTHING_EXPECTED, PlannedLoad
from kvmanager.segments.keys import TOLERANT

if TYPE_CHECKING:
    from vllm.v1.request import Request


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
        cutoff = None
        if not request.tables:
            cutoff = load_cutoff(request.request, loads, first, end, block, self._ttft_target_s, self._load_deadline_s)
        job = LoadJob(
            request.request.request_id,
            request.plan.lease_id,
            loads,
            first,
            block_ids[first:end],
            cutoff=cutoff,
            within_s=request.plan.within_s,
            tables=[table[first:end] for table in request.tables],
        )
        return job, cutoff.give_up_at if cutoff else math.inf


def load_cutoff(
    request: Request,
    loads: Sequence[PlannedLoad],
    first_block: int,
    end_block: int,
    block_tokens: int,
    target_s: float | None,
    least_s: float,
) -> PrefixLoad | None:
    """Return until when a load pays that begins now and brings a prompt's blocks from `first_block` up to `end_block`.

    What computing takes is the plan's expectation, per token as on average of the prompt. None while nothing is known
    of that: the load goes on to its deadline. A load goes on for `least_s`, and as long as the first token was
    expected to take, whatever its speed. A tolerant prompt's has `target_s` instead, if it is not None, counted from
    the prompt's arrival at the ingress (`EngineHints.arrived`).
    """
    hints = hints_of(request.kv_transfer_params)
    expected = hints.plan.expected if hints.plan else NOTHING_EXPECTED
    if not expected.recompute_s:
        return None
    prompt_tokens = request.num_prompt_tokens
    token_s = expected.recompute_s / max(1, prompt_tokens - expected.device_tokens)
    block_s = token_s * block_tokens
    parts = load_parts(loads, first_block, end_block)
    segments = [LoadedSegment(part.nbytes, block_s * part.blocks) for part in parts]
    rest_s = token_s * (prompt_tokens - end_block * block_tokens)
    now = time.monotonic()
    if target_s is not None and hints.fidelity == TOLERANT:
        return PrefixLoad(segments, rest_s, now, (now if hints.arrived is None else hints.arrived) + target_s)
    return PrefixLoad(segments, rest_s, now, least_s=max(least_s, expected.load_s))
