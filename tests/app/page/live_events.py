"""What the server's events and its trie say, for tests of the page: in their shapes, without a cache behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from playwright.sync_api import Route

MIB = 1 << 20
Event = tuple[str, Any]
Routes = Mapping[str, Callable[[Route], None]]


def cache(manager: str = "ok", **more: Any) -> dict[str, Any]:
    """A `cache` event as an administrator gets it; of an absent manager nothing is known but this ingress's counts."""
    known = manager == "ok"
    rates = {"hit_rate": 0.5, "recent_hit_rate": None}
    sizes = {"used_bytes": 3 * MIB if known else None, "budget_bytes": 12 * MIB if known else None}
    return {
        "manager": manager,
        "tiers": {tier: {**sizes, **rates} for tier in ("device", "cpu", "redis")},
        "replicas": [
            {"replica": str(rank), "ongoing": 2, "waiting": 1, "waiting_tokens": 1200, **sizes} for rank in range(2)
        ],
        "queue": {"ongoing": 4, "waiting": 3},
        "saved_prefill_s": 12.5,
        **more,
    }


def node(number: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """A node of the trie's answer."""
    return {
        "id": f"{number:064x}",
        "parent": None if parent is None else f"{parent:064x}",
        "kind": "request",
        "start_token": 0,
        "tokens": 256,
        "uses": 3.25,
        "hotness": 0.75,
        "bytes": 2 * MIB,
        "tiers": {"device": [0], "cpu": 2 * MIB, "redis": 0},
        "pinned": False,
        "children": 0,
        "hidden": 0,
        **more,
    }


TOKENS = {"device": 32, "cpu": 64, "redis": 0, "recomputed": 4, "blended": 0}
ROUTE = {"id": "r", "answer_id": "chatcmpl-r", "replica": "1", "reason": "hit", "tokens": TOKENS, "prompt_tokens": 100}
_CPU = {"tier": "cpu", "holder": "abcdef01"}
DIRECTIVE = {"number": 1, "kind": "evict", "source": _CPU, "target": None, "segments": 3, "outcome": "done"}


def in_the_servers_place(events: list[Event], nodes: list[dict[str, Any]]) -> Routes:
    """Routes that send these events, again and again, and this trie. The list of events may be changed later."""

    def send(route: Route) -> None:
        text = "".join(f"event: {name}\ndata: {json.dumps(said)}\n\n" for name, said in events)
        route.fulfill(body=text, content_type="text/event-stream")

    def trie(route: Route) -> None:
        route.fulfill(json={"nodes": nodes, "hidden": 7})

    return {"**/api/v1/events": send, "**/api/v1/kv/trie?*": trie}
