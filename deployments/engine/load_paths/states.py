"""States: what is loaded ends at a boundary whose states come too, and without them nothing has come.

The only path of a model with states but for `whole`, which is asked for nothing: token KV alone is of no use there.
vLLM ends a step, and keeps the states, at one boundary inside a prompt that it is told of: the one that the plan names,
else where the load ends. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deployments.engine.load_paths.base import LoadPath, Proposal
from deployments.engine.tracked_request import TrackedRequest
from deployments.protocol.engine_hints import EngineHints, extra
from deployments.transfer.jobs import StatePart
from kvmanager.extensions.states.landings import STATES, PlannedLanding

if TYPE_CHECKING:
    from deployments.engine.load_paths.parts import EngineParts


class StatesPath(LoadPath):
    """See the module's docstring."""

    def __init__(self, parts: EngineParts) -> None:
        assert parts.states is not None, "a model with states"
        self._whole, self._transfer, self._copier = parts.whole, parts.transfer, parts.states
        self._block_size = parts.block_size
        self.terms = max(1, parts.settings.kv.segment_tokens // parts.block_size)

    def entered(self, request: TrackedRequest, hints: EngineHints) -> None:
        """See `LoadPath`."""
        landing = extra(hints.plan, STATES, PlannedLanding)
        if landing is not None:
            request.state[self] = landing
            if 0 < landing.kept_block <= (request.request.num_tokens - 1) // self._block_size:
                request.saving.keep_boundary(landing.kept_block)
        if landing is None or landing.state is None:
            request.plan.drop()

    def propose(self, request: TrackedRequest, first_block: int) -> Proposal:
        """See `LoadPath`. Without a landing behind what the device has: nothing."""
        if request.wait.was_in_vain:
            request.give_plan_up(first_block)
        landing: PlannedLanding | None = request.state.get(self)
        end = first_block
        if landing is not None and landing.state is not None:
            block = landing.state.start_block
            if first_block < block == request.loadable_end(first_block, self._block_size):
                end = block
        behind = max(end if end > first_block else 0, request.saving.kept_boundary)
        if behind <= first_block:
            return Proposal(self, end)
        # vLLM has just said where its own prefix cache parts from this prompt: what reaches further counts.
        known = request.request.shared_prefix_boundary // self._block_size
        return Proposal(self, end, boundary_block=max(behind, known))

    def start(
        self,
        request: TrackedRequest,
        block_ids: Sequence[int],
        proposal: Proposal,
        ended: Callable[[TrackedRequest, int], None],
    ) -> None:
        """See `LoadPath`."""
        landing: PlannedLanding = request.state[self]
        assert landing.state is not None, "nothing else is proposed"
        at = proposal.end_block - 1
        part = StatePart(landing.state, self._copier, [table[at : at + 1] for table in request.tables])
        job, give_up_at = self._whole.job(request, block_ids)
        self._transfer.submit_load(replace(job, state=part), give_up_at)


def build(parts: EngineParts) -> StatesPath:
    """Return the path of an engine."""
    return StatesPath(parts)
