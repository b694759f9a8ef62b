"""What the manager's actor tells people of its index and its orders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kv_cluster import FINGERPRINT, SEGMENT_BYTES, SIZES, offered, sequence

from deployments.manager.actor import KVManagerActor
from deployments.manager.people import calls
from kvmanager.config import ManagerConfig

NODE, REPLICA = "node", "replica"


class QuietTier:
    """A tier's handle that does what it is told: nothing."""

    def __init__(self) -> None:
        self.evict = self.stats = self

    async def remote(self, *args: Any) -> dict[str, Any]:
        return {}


def with_manager(test: Any, segments: int = 4, **config: Any) -> None:
    async def main() -> None:
        manager = KVManagerActor(ManagerConfig(blocks_per_segment=4, **config))
        await manager.register_tier(NODE, QuietTier(), "first life", segments * SEGMENT_BYTES, [], [])
        await manager.register_replica(REPLICA, 0, NODE, [], FINGERPRINT)
        await asyncio.wait_for(test(manager), 20)
        manager._housekeeping.cancel()

    asyncio.run(main())


async def save(manager: KVManagerActor, spans: list[Any]) -> None:
    offer = await manager.offer(REPLICA, NODE, offered(spans), SIZES)
    assert offer is not None
    await manager.commit(NODE, offer[1], [SEGMENT_BYTES] * len(offer[1]))


def test_the_tree_names_replicas_by_number_and_is_put_into_words_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DESCRIBED_AT_ONCE", 1)

    async def test(manager: KVManagerActor) -> None:
        _, spans = sequence(1, 3)
        await save(manager, spans)
        await manager.report_placement(REPLICA, [([spans[0].key], [], False)])
        found = await manager.trie(None, None, 3, 10)
        assert found is not None
        assert [node["id"] for node in found["nodes"]] == [span.key.hex() for span in spans]
        assert [node["tiers"] for node in found["nodes"]] == [
            {"device": [0], "cpu": SEGMENT_BYTES, "redis": 0},
            {"device": [], "cpu": SEGMENT_BYTES, "redis": 0},
            {"device": [], "cpu": SEGMENT_BYTES, "redis": 0},
        ]
        below = await manager.trie(None, spans[1].key, 3, 10)
        assert below is not None
        assert [node["id"] for node in below["nodes"]] == [span.key.hex() for span in spans[1:]]
        assert await manager.trie("a tenant", None, 3, 10) == {"nodes": [], "hidden": 0}
        assert await manager.trie("a tenant", spans[1].key, 3, 10) is None

    with_manager(test)


def test_live_figures_ask_nobody_and_tell_orders_once() -> None:
    async def test(manager: KVManagerActor) -> None:
        first = await manager.live(-1, ["somebody"])
        assert (first["directives"], first["missed_directives"], first["device_blocks"]) == ([], 0, {0: 0})
        assert first["locations"][0]["budget_bytes"] == 4 * SEGMENT_BYTES
        assert first["tenants"]["somebody"]["tiers"]["cpu"]["bytes"] == 0
        await save(manager, sequence(1, 4)[1])
        await manager.plan(REPLICA, NODE, sequence(2, 2)[0])
        await save(manager, sequence(2, 2)[1])
        told = await manager.live(first["last"], [])
        evictions = [(order["kind"], order["source"], order["segments"]) for order in told["directives"]]
        assert evictions == [("evict", ("cpu", NODE), 2)]
        assert (await manager.live(told["last"], []))["directives"] == []
        refused = await manager.direct("evict", REPLICA, sequence(1, 1)[0], 0.0)
        assert refused["outcome"] != "done"
        (order,) = (await manager.live(told["last"], []))["directives"]
        assert (order["kind"], order["source"]) == ("evict", ("device", "0"))
        assert order["outcome"] == refused["outcome"]

    with_manager(test, segments=4)
