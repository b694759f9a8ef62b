"""Readable descriptions of the index, for the control API. Nothing here changes anything or counts a use."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kvmanager.eviction.pins import Pins
from kvmanager.index.catalog import Catalog
from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Node
from kvmanager.index.stores import Store
from kvmanager.manager_parts import ManagerParts
from kvmanager.segments.keys import BlockHash, state_name


def lookup_report(parts: ManagerParts, hashes: Sequence[BlockHash], most_blocks: int | None) -> dict[str, Any]:
    """Describe what is known of a prompt: leading blocks per replica and per shared tier, and the segments.

    ``end``: where the prompt's part of a segment ends, which may be before its own end. ``redis`` counts dense copies,
    as plans for dense KV do; ``redis_in_any_form`` counts others too, which only some prompts may be given.
    ``most_blocks``: of a model with states, the blocks that leave a token to compute (`_add_landings`); None: it has
    no states.
    """
    search, devices = parts.search, parts.devices
    report: dict[str, Any] = {
        "blocks": len(hashes),
        "device": {replica: devices.leading_blocks(replica, hashes) for replica, _ in devices.replicas()},
    }
    for tier in (Tier.CPU, Tier.REDIS):
        report[tier.value] = search.reach(hashes, tier)
    path, ends, _ = search.find(hashes)
    report["redis_in_any_form"] = max(report[Tier.REDIS.value], _reach_at_redis(path, ends))
    report["segments"] = [
        {
            "key": node.key.hex(),
            "start": node.start_block,
            "num_blocks": node.num_blocks,
            "end": end,
            "tiers": _tiers_of(node),
            "has_other_form": any(copy.form for copy in node.all_copies() if copy.resident),
            "kind": node.kind.value,
            "pinned": bool(node.pins),
            "uses": parts.clock.uses(node.score),
        }
        for node, end in zip(path, ends, strict=True)
    ]
    if most_blocks is not None:
        _add_landings(report, parts.catalog, hashes, most_blocks)
    return report


def _add_landings(report: dict[str, Any], catalog: Catalog, hashes: Sequence[BlockHash], most_blocks: int) -> None:
    """Add where a prompt can be resumed: ``landings`` to each segment, and to the report the last one, ``landing``.

    A landing is the ``end`` of a block behind which states are stored, in these ``tiers``: what they follow on is there
    too (closed chains). The last one is that of the first ``most_blocks``; 0: there is none. O(known blocks) hashes.
    """
    report["landing"] = begin = 0
    for segment in report["segments"]:
        segment["landings"] = []
        for end in range(begin + 1, segment["end"] + 1):
            states = catalog.trie.nodes.get(state_name(hashes[end - 1]))
            if states is not None and (tiers := _tiers_of(states)):
                segment["landings"].append({"end": end, "tiers": tiers})
                if end <= most_blocks:
                    report["landing"] = end
        begin = segment["end"]


def _tiers_of(node: Node) -> list[str]:
    return sorted({copy.store.location.tier.value for copy in node.all_copies() if copy.resident})


def _reach_at_redis(path: Sequence[Node], ends: Sequence[int]) -> int:
    """Return up to which block Redis has a prompt's known segments without a gap, in whatever form."""
    reach = 0
    for node, end in zip(path, ends, strict=True):
        at_redis = (copy.store.location.tier == Tier.REDIS for copy in node.all_copies() if copy.resident)
        if node.start_block > reach or not any(at_redis):
            break
        reach = end
    return reach


def tenant_report(tenant: str, stores: Iterable[Store], pins: Pins) -> dict[str, Any]:
    """Describe what one tenant (by tag) has, and nothing of other tenants or of where the tiers are."""
    tiers: dict[str, dict[str, int | None]] = {}
    for store in stores:
        share = store.shares.get(tenant)
        quota = store.quotas.get(tenant)
        nothing = {"segments": 0, "bytes": 0, "quota_bytes": None, "states": 0, "state_bytes": 0}
        sums = tiers.setdefault(store.location.tier.value, nothing)
        for name, value in (
            ("segments", share.segments if share else 0),
            ("bytes", share.nbytes if share else 0),
            ("quota_bytes", quota),
            ("states", share.states.segments if share else 0),
            ("state_bytes", share.states.nbytes if share else 0),
        ):
            if value is not None:
                sums[name] = (sums[name] or 0) + value
    return {"tiers": tiers, **pins.report_of(tenant)}


def store_report(store: Store) -> dict[str, Any]:
    """Describe one location; ``tenants`` are those with a quota, whose budget is less where not all quotas fit.

    ``states`` are those of the segments that hold a model's states, and ``state_bytes`` their bytes.
    """
    tier, holder = store.location
    return {
        "tier": tier.value,
        "holder": holder,
        "segments": store.resident_segments,
        "bytes": store.used_bytes,
        "reserved_bytes": store.reserved_bytes,
        "budget_bytes": store.budget_bytes,
        "states": store.states.segments,
        "state_bytes": store.states.nbytes,
        "tenants": {
            tenant: {
                "bytes": partition.used_bytes,
                "quota_bytes": store.quotas[tenant],
                "budget_bytes": partition.budget_bytes,
            }
            for tenant, partition in store.tenants.items()
        },
    }


def manager_report(parts: ManagerParts, now: float) -> dict[str, Any]:
    """Sizes and counters. O(partitions and pins)."""
    return {
        "nodes": len(parts.trie.nodes),
        "ghosts": parts.trie.num_ghosts,
        "locations": [store_report(store) for store in parts.catalog.stores.values()],
        "leases": len(parts.leases),
        "reservations": len(parts.saves),
        "demotions": len(parts.demotions),
        "demotion_queue": len(parts.queue),
        **parts.pins.report(now),
        "oldest_lease_s": parts.leases.oldest_s(now),
        "oldest_reservation_s": parts.saves.oldest_s(now),
        "last_delta": parts.log.last,
        "counters": {**asdict(parts.counters), "refused_twins": parts.trie.twins_refused},
    }
