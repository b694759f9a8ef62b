"""Prefixes of tolerant prompts that are stored sparse, as a plan has them: whole segments from the first block on.

One sparse segment makes the whole prefix a sparse load, its dense segments with it: what a layer keeps of those is all.
Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.extensions.sparse.names import kept_digest
from kvmanager.moves.plan import PlannedLoad, PlanQuery

SPARSE: Final = "sparse"
"""Name of the `Budgets` that an engine presents in a query's extras, and of a `PlannedSparse` in a plan's."""


@dataclass(frozen=True, slots=True)
class PlannedSparse:
    """A tolerant prompt's prefix of which not all KV is kept; such a prompt comes under names of its own.

    ``loads`` are stored sparse, used whole, and follow each other from the prompt's first block on: fewer tokens than
    the prompt has. They take the place of the plan's segments, and are under its lease.
    """

    loads: tuple[PlannedLoad, ...]
    kept: tuple[tuple[int, ...], ...]
    """Blocks of keys that each layer keeps, by segment."""
    forms: tuple[bytes, ...]
    """Of the copies that are loaded (`kvmanager.segments.forms`), empty for a dense segment."""
    digest: bytes
    """Names what is kept (`kvmanager.extensions.sparse.names.sparse_salt`)."""

    @property
    def blocks(self) -> int:
        """Blocks of the prefix."""
        return self.loads[-1].end_block


def asked_budgets(query: PlanQuery) -> Budgets | None:
    """Return the budgets that the asker presents; None: it takes dense KV only."""
    budgets: Budgets | None = query.extras.get(SPARSE)
    return budgets


def most_blocks(query: PlanQuery, block_tokens: int) -> int:
    """Return how many of a prompt's blocks a sparse prefix may have: the last token is computed."""
    return (max(query.prompt_tokens, len(query.hashes) * block_tokens) - 1) // block_tokens


def retained_prefix(budgets: Budgets, loads: Sequence[PlannedLoad], forms: Sequence[bytes]) -> PlannedSparse | None:
    """Return what is kept of segments with these ``forms``; None where all of them are dense."""
    if not any(forms):
        return None
    layers = range(len(budgets.shares))
    kept = tuple(
        tuple(budgets.kept_blocks(layer, load.num_blocks) if form else load.num_blocks for layer in layers)
        for load, form in zip(loads, forms, strict=True)
    )
    return PlannedSparse(tuple(loads), kept, tuple(forms), kept_digest(budgets, forms))
