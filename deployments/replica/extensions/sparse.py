"""A replica's plans of tolerant prompts, where its engine presents sparse KV."""

from __future__ import annotations

from typing import Any

from deployments.protocol.engine_hints import extra
from deployments.protocol.wire import GenerateRequest
from deployments.replica.plan_extension import EngineTerms, PlannedExtra
from kvmanager.extensions.sparse.retained_prefixes import SPARSE, PlannedSparse, sparse_salt
from kvmanager.moves.plan import Plan
from kvmanager.segments.keys import TOLERANT


class _SparsePrefix(PlannedExtra):
    def __init__(self, sparse: PlannedSparse, salt: str) -> None:
        self.loads = sparse.loads
        self.salt = sparse_salt(salt, sparse.loads[-1].key, sparse.digest)


class SparsePrefixes:
    """See the module's docstring. The engine's terms are its budgets."""

    def ask(self, request: GenerateRequest, engine: EngineTerms) -> Any:
        """Return the budgets that the engine presents, for a tolerant prompt."""
        return engine.terms if request.fidelity == TOLERANT else None

    def planned(self, request: GenerateRequest, plan: Plan, engine: EngineTerms) -> PlannedExtra | None:
        """Return the sparse prefix that takes the place of the prompt's own segments, and its names."""
        sparse = extra(plan, SPARSE, PlannedSparse) if request.fidelity == TOLERANT else None
        return None if sparse is None else _SparsePrefix(sparse, request.cache_salt)


def build() -> SparsePrefixes:
    """Make it."""
    return SparsePrefixes()
