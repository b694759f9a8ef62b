"""What the tiers hold, from GET /api/v1/kv/stats: of the whole server, or of the tenant whose key it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stored:
    """Of one tier, on all nodes. `budget_bytes`: None where the key's tenant has no quota there."""

    segments: int
    nbytes: int
    budget_bytes: int | None

    @property
    def fill(self) -> float | None:
        """Share of the budget that is used."""
        return self.nbytes / self.budget_bytes if self.budget_bytes else None


def stored_by_tier(stats: Mapping[str, Any]) -> dict[str, Stored]:
    """By tier; of a tenant its own share, whose budget is its quota. What is no number counts as none."""
    tiers = stats.get("tiers")
    if isinstance(tiers, Mapping):
        return {str(tier): _stored(of, "quota_bytes") for tier, of in tiers.items() if isinstance(of, Mapping)}
    found: dict[str, Stored] = {}
    for place in stats.get("locations") or ():
        tier, one = str(place.get("tier")), _stored(place, "budget_bytes")
        before = found.get(tier, Stored(0, 0, 0))
        budget = (before.budget_bytes or 0) + (one.budget_bytes or 0)
        found[tier] = Stored(before.segments + one.segments, before.nbytes + one.nbytes, budget or None)
    return found


def _stored(of: Mapping[str, Any], budget: str) -> Stored:
    limit = of.get(budget)
    return Stored(_int(of.get("segments")), _int(of.get("bytes")), None if limit is None else _int(limit))


def _int(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
