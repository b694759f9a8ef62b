"""The manager's answers to replicas about prompts: plans under a lease.

On the manager's event loop, and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager.loading.load_choice import LoadChoice
from kvmanager.manager import KVManager
from kvmanager.moves.plan import Plan, PlanQuery


class PromptPlanner:
    """See the module's docstring. `now`: seconds of the manager's clock."""

    def __init__(self, brain: KVManager, loads: LoadChoice) -> None:
        self._brain = brain
        self._loads = loads

    def plan(self, now: float, replica: str, node_id: str, query: PlanQuery) -> Plan:
        """Return the stored KV of a registered replica's prompt that is worth loading, under a lease."""
        device_blocks = self._brain.offloads.device_blocks(replica, query.hashes)
        choice = self._loads.for_prompt(now, replica, device_blocks, query)
        plan = self._brain.plan(now, replica, node_id, query, choice)
        self._brain.extend_lease(plan.lease_id, choice.deadline_s + choice.reads_s)
        self._loads.planned(choice, plan.lease_id, plan.reason)
        return plan

    def release(self, lease_ids: Iterable[int]) -> None:
        """Leases that are used up."""
        for lease_id in lease_ids:
            self._brain.release(lease_id)
            self._loads.ended(lease_id)
