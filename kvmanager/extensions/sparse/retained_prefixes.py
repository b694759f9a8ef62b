"""Prefixes of tolerant prompts that are stored sparse, as a plan has and names them: whole segments from the start on.

One sparse segment makes the whole prefix a sparse load, its dense segments with it: what a layer keeps of those is all.
Pure: any thread.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.moves.plan import PlannedLoad, PlanQuery
from kvmanager.segments.forms import DENSE, LEVEL_BYTES

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
    """Names what is kept (`sparse_salt`)."""

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


def serves(form: bytes, budgets: Budgets | None) -> bool:
    """Return whether a copy of this form is of use to a reader with these budgets; None: dense KV only."""
    if form == DENSE:
        return True
    return budgets is not None and form[:LEVEL_BYTES] == budgets.header_level.to_bytes(LEVEL_BYTES, "little")


def kept_digest(budgets: Budgets, forms: Sequence[bytes]) -> bytes:
    """Return 32 bytes that name what is kept of a prefix: of the budgets, and of each segment what its form says."""
    digest = hashlib.sha256(b"crosskv-kept" + budgets.digest)
    for form in forms:
        digest.update(len(form).to_bytes(2, "little") + form)
    return digest.digest()


def sparse_salt(salt: str, last_key: bytes, kept: bytes) -> str:
    """Return the salt (64 hex characters) of prompts that begin with one sparse prefix, of which not all KV is kept.

    ``salt`` is the tolerant one, ``last_key`` the key of the prefix's last segment, ``kept`` a digest of what is kept:
    of the budgets, and of the choice of tokens where equal budgets may leave different ones. A block of such a prefix
    holds what is kept of *all* of it, not of the tokens up to the block. So a prompt that shares only a part of it must
    find nothing, and each prefix has names of its own. Each part is hashed with its length before it. Raises ValueError
    for an empty salt, which would share KV between tenants.
    """
    if not salt:
        raise ValueError("an empty salt would let tenants and models share KV: pass cache_salt(...)")
    digest = hashlib.sha256(b"crosskv-sparse")
    for part in (salt.encode(), last_key, kept):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
