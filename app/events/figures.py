"""What a `cache` event says: from the ingress's own counts and what the manager said last. Pure.

An administrator is told of all tenants together and of every replica. A tenant is told of its own: its prompts, its
bytes by tier, its live prompts, and nothing of places or of others. `hit_rate` is since the ingress began,
`recent_hit_rate` of the last minute, both of all prompt tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.events.savings import Savings

AWAY, OK = "away", "ok"
TIERS = ("device", "cpu", "redis")


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """A prompt under way; `replica`: its number, None: not known; `waits`: it has no token yet."""

    tenant: str
    replica: int | None
    prompt_tokens: int
    waits: bool


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """What others have said: `manager`: the last answer to `live`; None: it does not answer.

    `device_blocks`: by replica's number, the size of its pool; `block_bytes`: of KV in a block of it.
    """

    manager: Mapping[str, Any] | None = None
    device_blocks: Mapping[int, int] = field(default_factory=dict)
    block_bytes: int = 0


def for_admin(
    known: ManagerSnapshot,
    savings: Savings,
    live: Iterable[LivePrompt],
    ranks: Collection[int],
    queue: Mapping[str, int],
) -> dict[str, Any]:
    """The figures of all tenants. `ranks`: the replicas known to take requests; `queue`: of the ingress."""
    live, manager = list(live), known.manager
    used: Counter[str] = Counter()
    budgets: Counter[str] = Counter()
    segments: Counter[str] = Counter()
    for place in manager["locations"] if manager else ():
        used[place["tier"]] += place["bytes"]
        budgets[place["tier"]] += place["budget_bytes"]
        segments[place["tier"]] += place["segments"]
    held: Mapping[int, int] = manager["device_blocks"] if manager else {}
    used["device"] = sum(held.values()) * known.block_bytes
    budgets["device"] = sum(known.device_blocks.get(rank, 0) for rank in held) * known.block_bytes
    rates = savings.hit_rates()
    tiers = {
        tier: {
            "used_bytes": used[tier] if manager else None,
            "budget_bytes": (budgets[tier] or None) if manager else None,
            **({} if tier == "device" else {"segments": segments[tier] if manager else None}),
            **_rates(rates[tier], savings.tokens[tier]),
        }
        for tier in TIERS
    }
    named = {one.replica for one in live if one.replica is not None}
    return {
        "manager": OK if manager else AWAY,
        "tiers": tiers,
        "replicas": [_replica(rank, live, known, held) for rank in sorted({*ranks, *named, *held})],
        "queue": dict(queue),
        **savings.report(),
        "index": {name: manager[name] for name in ("nodes", "ghosts", "pins")} if manager else None,
    }


def for_tenant(
    known: ManagerSnapshot, tenant: str, tag: str, savings: Savings, live: Iterable[LivePrompt]
) -> dict[str, Any]:
    """The figures of one tenant. A device does not say which tenant its blocks belong to."""
    own = [one for one in live if one.tenant == tenant]
    report = (known.manager or {}).get("tenants", {}).get(tag)
    rates = savings.hit_rates()
    tiers: dict[str, dict[str, Any]] = defaultdict(dict)
    for tier in TIERS:
        place = (report or {}).get("tiers", {}).get(tier, {})
        if tier != "device":
            tiers[tier] |= {
                "used_bytes": place.get("bytes", 0) if report else None,
                "budget_bytes": place.get("quota_bytes"),
                "segments": place.get("segments", 0) if report else None,
            }
        tiers[tier] |= _rates(rates[tier], savings.tokens[tier])
    waiting = sum(one.waits for one in own)
    return {
        "manager": AWAY if known.manager is None else OK,
        "tiers": dict(tiers),
        "replicas": [],
        "queue": {"ongoing": len(own), "waiting": waiting},
        **savings.report(),
        "index": None,
    }


def _replica(rank: int, live: Iterable[LivePrompt], known: ManagerSnapshot, held: Mapping[int, int]) -> dict[str, Any]:
    """`ongoing`: prompts that it works on; `waiting`: of these, those without a token yet, and their tokens."""
    own = [one for one in live if one.replica == rank]
    waiting = [one.prompt_tokens for one in own if one.waits]
    blocks, budget = held.get(rank), known.device_blocks.get(rank)
    return {
        "replica": str(rank),
        "ongoing": len(own),
        "waiting": len(waiting),
        "waiting_tokens": sum(waiting),
        "used_bytes": None if blocks is None else blocks * known.block_bytes,
        "budget_bytes": None if budget is None else budget * known.block_bytes,
    }


def _rates(rates: tuple[float | None, float | None], tokens: int) -> dict[str, Any]:
    return {"hit_tokens": tokens, "hit_rate": rates[0], "recent_hit_rate": rates[1]}
