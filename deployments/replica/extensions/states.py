"""A replica's plans for an engine with states: all of its prompts ask where they may begin."""

from __future__ import annotations

from typing import Any

from deployments.protocol.wire import GenerateRequest
from deployments.replica.plan_extension import EngineTerms, PlannedExtra
from kvmanager.moves.plan import Plan


class StatefulPrompts:
    """See the module's docstring. The engine's terms are True."""

    def ask(self, request: GenerateRequest, engine: EngineTerms) -> Any:
        """Return True: the engine has states."""
        return engine.terms

    def planned(self, request: GenerateRequest, plan: Plan, engine: EngineTerms) -> PlannedExtra | None:
        """Return nothing: the plan's own segments say how much is spared."""
        return None


def build() -> StatefulPrompts:
    """Make it."""
    return StatefulPrompts()
