"""The interface by which an extension takes part in a replica's plans.

Asked for each prompt of a replica whose engine has terms for it (`PlanSource.terms`): what to ask of the manager, and
what became of that in the plan. On the replica's event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from deployments.protocol.wire import GenerateRequest, KVCacheUsage
    from kvmanager.moves.plan import Plan, PlannedLoad


class EngineTerms(NamedTuple):
    """What the engine's load path says of itself, for plans, and the engine's block size."""

    terms: Any
    block_tokens: int


class PlannedExtra:
    """What an extension brings to one prompt, by its plan. The defaults bring nothing."""

    loads: Sequence[PlannedLoad] | None = None
    """What is planned of the prompt's own beginning in the place of the plan's segments; None: these."""
    salt: str | None = None
    """Under which the prompt comes to the engine in the place of its own; None: its own."""

    def saved_tokens(self, start: int) -> int:
        """Return how many tokens behind the first ``start`` are not computed. Called once, before the others."""
        return 0

    def reused(self, usage: KVCacheUsage) -> int:
        """Return how many of the reused tokens are no part of what was planned of the prompt's own beginning."""
        return 0

    def failed(self, usage: KVCacheUsage) -> bool:
        """Return whether what was planned did not come."""
        return False


class ReplicaExtension(Protocol):
    """An extension of a replica's plans."""

    def ask(self, request: GenerateRequest, engine: EngineTerms) -> Any:
        """Return what to ask of the manager for a prompt; None: nothing."""
        ...

    def planned(self, request: GenerateRequest, plan: Plan, engine: EngineTerms) -> PlannedExtra | None:
        """Return what a plan brings; None: nothing of this extension."""
        ...
