"""The manager's answers to replicas about prompts: plans under a lease, and what is stored of chunks.

On the manager's event loop, and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deployments.manager.plan_answer import plan_answer
from deployments.protocol.kv_port import BlendQuery, PlanDict
from kvmanager.loading.load_choice import LoadChoice
from kvmanager.manager import KVManager
from kvmanager.moves.retained_prefixes import SparseQuery
from kvmanager.segments.budgets import Budgets
from kvmanager.segments.keys import BlockHash


class PromptPlanner:
    """See the module's docstring. `now`: seconds of the manager's clock."""

    def __init__(self, brain: KVManager, loads: LoadChoice, block_tokens: int) -> None:
        self._brain = brain
        self._loads = loads
        self._block_tokens = block_tokens

    def plan(
        self,
        now: float,
        replica: str,
        node_id: str,
        hashes: Sequence[BlockHash],
        exact_hashes: Sequence[BlockHash],
        prompt_tokens: int,
        queued_tokens: int,
        blend: BlendQuery | None,
        sparse: Budgets | None,
    ) -> PlanDict:
        """Return the stored KV of a registered replica's prompt that is worth loading or blending, under a lease."""
        device_blocks = self._brain.offloads.device_blocks(replica, hashes)
        choice = self._loads.for_prompt(now, replica, device_blocks, len(hashes), prompt_tokens, queued_tokens, blend)
        most_blocks = (max(prompt_tokens, len(hashes) * self._block_tokens) - 1) // self._block_tokens
        query = SparseQuery(hashes, sparse, most_blocks, device_blocks) if sparse is not None else None
        plan = self._brain.plan(
            now,
            replica,
            node_id,
            hashes,
            exact_hashes=exact_hashes,
            choose=choice.choose,
            chunks=blend.chunks if blend else (),
            choose_chunks=choice.choose_chunks,
            sparse=query,
        )
        # A blend's chunks are read while its first layers are computed, so they stay for as long as it takes.
        self._brain.extend_lease(plan.lease_id, choice.deadline_s + choice.blend_s)
        self._loads.planned(choice, plan.lease_id, plan.reason)
        return plan_answer(plan, self._brain.epoch, choice, self._loads.short_tokens(replica))

    def release(self, lease_ids: Iterable[int]) -> None:
        """Leases that are used up."""
        for lease_id in lease_ids:
            self._brain.release(lease_id)
            self._loads.ended(lease_id)
