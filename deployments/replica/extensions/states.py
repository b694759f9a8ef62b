"""A replica's plans for an engine with states: all of its prompts ask where they may begin."""

from __future__ import annotations

from typing import Any

from deployments.protocol.wire import GenerateRequest
from deployments.replica.plan_extension import EngineTerms, PlannedExtra
from kvmanager.extensions.states.landings import STATES, LandingQuery
from kvmanager.moves.plan import Plan


class StatefulPrompts:
    """See the module's docstring. The engine's terms are `LandingQuery.least_blocks`."""

    def ask(self, request: GenerateRequest, engine: EngineTerms) -> LandingQuery:
        """Return what to ask, with the boundary before the last message where the ingress knows of that."""
        begins: Any = request.extras.get(STATES)
        known = isinstance(begins, int) and 0 < begins < len(request.prompt_token_ids)
        return LandingQuery(begins // engine.block_tokens if known else 0, engine.terms)

    def planned(self, request: GenerateRequest, plan: Plan, engine: EngineTerms) -> PlannedExtra | None:
        """Return nothing: the plan's own segments say how much is spared."""
        return None


def build() -> StatefulPrompts:
    """Make it."""
    return StatefulPrompts()
