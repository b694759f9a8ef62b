"""What the manager's actor tells people of its index and its orders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kv_cluster import FINGERPRINT, SEGMENT_BYTES, SIZES, offered, sequence

from deployments.manager import reports
from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from kvmanager.config import ManagerConfig
from kvmanager.moves.directives import DirectiveResult, Outcome
from kvmanager.moves.plan import PlanQuery
from load_tests.harness.patience import PATIENCE_S, patience

pytestmark = pytest.mark.usefixtures("patient")

NODE, REPLICA = "node", "replica"


class QuietTier:
    """A tier's handle that does what it is told: nothing."""

    def __init__(self) -> None:
        self.evict = self.stats = self
        self.block_hashes = NamingTier()

    async def remote(self, *args: Any) -> dict[str, Any]:
        return {}


class NamingTier:
    """Says what the blocks of segments are called."""

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []

    async def remote(self, keys: list[bytes]) -> list[bytes]:
        self.asked += keys
        return [self.known.get(key, b"") for key in keys]


def with_manager(test: Any, segments: int = 4, **config: Any) -> None:
    async def main() -> None:
        manager = KVManagerActor(ManagerConfig(blocks_per_segment=4, **config))
        await manager.register_tier(NODE, QuietTier(), "first life", segments * SEGMENT_BYTES, [], [])
        await manager.register_replica(REPLICA, 0, NODE, [], EngineFacts(FINGERPRINT))
        await asyncio.wait_for(test(manager), patience(PATIENCE_S))
        manager._housekeeping.cancel()

    asyncio.run(main())


async def save(manager: KVManagerActor, spans: list[Any]) -> None:
    offer = await manager.offer(REPLICA, NODE, offered(spans), SIZES)
    assert offer is not None
    await manager.commit(NODE, offer[1], [SEGMENT_BYTES] * len(offer[1]))


def test_the_tree_names_replicas_by_number_and_is_put_into_words_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "DESCRIBED_AT_ONCE", 1)

    async def test(manager: KVManagerActor) -> None:
        _, spans = sequence(1, 3)
        await save(manager, spans)
        await manager.report_placement(REPLICA, [([spans[0].key], [], False)])
        found = await manager.api("trie", None, None, 3, 10)
        assert found is not None
        assert [node["id"] for node in found["nodes"]] == [span.key.hex() for span in spans]
        assert [node["tiers"] for node in found["nodes"]] == [
            {"device": [0], "cpu": SEGMENT_BYTES, "redis": 0},
            {"device": [], "cpu": SEGMENT_BYTES, "redis": 0},
            {"device": [], "cpu": SEGMENT_BYTES, "redis": 0},
        ]
        below = await manager.api("trie", None, spans[1].key, 3, 10)
        assert below is not None
        assert [node["id"] for node in below["nodes"]] == [span.key.hex() for span in spans[1:]]
        assert await manager.api("trie", "a tenant", None, 3, 10) == {"nodes": [], "hidden": 0}
        assert await manager.api("trie", "a tenant", spans[1].key, 3, 10) is None

    with_manager(test)


def test_live_figures_ask_nobody_and_tell_orders_once() -> None:
    async def test(manager: KVManagerActor) -> None:
        first = await manager.api("live", -1, ["somebody"])
        assert (first["directives"], first["missed_directives"], first["device_blocks"]) == ([], 0, {0: 0})
        assert first["locations"][0]["budget_bytes"] == 4 * SEGMENT_BYTES
        assert first["tenants"]["somebody"]["tiers"]["cpu"]["bytes"] == 0
        await save(manager, sequence(1, 4)[1])
        await manager.plan(REPLICA, NODE, PlanQuery(sequence(2, 2)[0]))
        await save(manager, sequence(2, 2)[1])
        told = await manager.api("live", first["last"], [])
        evictions = [(order["kind"], order["source"], order["segments"]) for order in told["directives"]]
        assert evictions == [("evict", ("cpu", NODE), 2)]
        assert (await manager.api("live", told["last"], []))["directives"] == []
        refused = await manager.api("direct", "evict", REPLICA, sequence(1, 1)[0], 0.0)
        assert refused["outcome"] != "done"
        (order,) = (await manager.api("live", told["last"], []))["directives"]
        assert (order["kind"], order["source"]) == ("evict", ("device", "0"))
        assert order["outcome"] == refused["outcome"]

    with_manager(test, segments=4)


def test_an_eviction_is_told_beforehand_and_then_done() -> None:
    async def test(manager: KVManagerActor) -> None:
        hashes, spans = sequence(1, 3)
        await save(manager, spans)
        asked = hashes, None, None, ["cpu", "redis"], None, 1.0
        would = await manager.api("evict_prompt", *asked, True)
        assert would == {
            "cpu": {"segments": 3, "bytes": 3 * SEGMENT_BYTES},
            "redis": {"segments": 0, "bytes": 0},
        }
        assert (await manager.api("lookup", hashes))["cpu"] == len(hashes)
        assert await manager.api("evict_prompt", *asked, False) == {**would, "outcome": "done"}
        assert (await manager.api("lookup", hashes))["cpu"] == 0
        (order,) = (await manager.api("live", 0, []))["directives"]
        assert (order["kind"], order["source"], order["segments"]) == ("evict", ("cpu", NODE), 3)

    with_manager(test)


def test_a_node_is_pinned_and_evicted_by_its_owner_or_an_administrator() -> None:
    async def test(manager: KVManagerActor) -> None:
        hashes, spans = sequence(1, 3)
        await save(manager, spans)
        key = spans[1].key
        for refused in (
            await manager.api("pin_node", key, 10.0, "another"),
            await manager.api("pin_node", bytes(32), 10.0, None),
            await manager.api("evict_prompt", (), key, "another", ["cpu"], None, 1.0, False),
        ):
            assert refused["refused"] == "unknown_key"
        assert (await manager.api("pin_node", key, 10.0, ""))["segments"] == 2
        refused = await manager.api("evict_prompt", hashes[:4], None, None, ["cpu"], None, 1.0, False)
        assert (refused["refused"], refused["outcome"]) == ("pinned", "pinned")
        assert (await manager.api("lookup", hashes))["cpu"] == len(hashes)
        assert await manager.api("pin_node", key, None, None) == {"unpinned": 1}
        evicted = await manager.api("evict_prompt", (), key, "", ["cpu", "device"], None, 1.0, False)
        assert (evicted["outcome"], evicted["cpu"]["segments"], "device" in evicted) == ("done", 3, False)

    with_manager(test, pin_budget_bytes=10 * SEGMENT_BYTES)


def test_a_node_is_named_for_orders_by_what_devices_and_cpu_tiers_say_and_to_its_owner_only() -> None:
    async def test(manager: KVManagerActor) -> None:
        hashes, spans = sequence(1, 3)
        await save(manager, spans)
        key, tier = spans[1].key, manager._tiers.cpu[NODE].handle.block_hashes
        assert (await manager.api("hashes_to", key, "another"))["refused"] == "unknown_key"
        assert (await manager.api("hashes_to", b"x", None))["refused"] == "unknown_key"
        assert tier.asked == [], "nobody is asked of what is another's"
        assert (await manager.api("hashes_to", key, ""))["refused"] == "not_named"
        tier.known = {span.key: b"".join(hashes[span.start_block : span.end_block]) for span in spans}
        assert await manager.api("hashes_to", key, "") == {"hashes": list(hashes[:8])}
        assert tier.asked == [spans[0].key, key] * 2
        await manager.report_placement(REPLICA, [(list(hashes), [], False)])
        assert await manager.api("hashes_to", spans[2].key, None) == {"hashes": list(hashes)}
        assert len(tier.asked) == 4, "the device has said it"
        del manager._tiers.cpu[NODE].handle.block_hashes
        assert await manager.api("hashes_to", key, "") == {"hashes": list(hashes[:8])}

    with_manager(test)


def test_a_cpu_tier_that_does_not_answer_leaves_a_node_without_names() -> None:
    async def test(manager: KVManagerActor) -> None:
        _, spans = sequence(1, 3)
        await save(manager, spans)
        del manager._tiers.cpu[NODE].handle.block_hashes
        assert (await manager.api("hashes_to", spans[1].key, ""))["refused"] == "not_named"

    with_manager(test)


def test_what_a_clear_and_a_move_would_do_is_told_and_nothing_is_done() -> None:
    async def test(manager: KVManagerActor) -> None:
        hashes, spans = sequence(1, 3)
        await save(manager, spans)
        await manager.register_replica("second", 1, NODE, list(hashes[:6]), EngineFacts(FINGERPRINT))
        assert await manager.api("would_clear", ["device", "cpu"]) == {
            "cpu": {"segments": 3, "bytes": 3 * SEGMENT_BYTES},
            "device": {"0": {"blocks": 0}, "1": {"blocks": 6}},
        }
        assert await manager.api("would_clear", ["device", "cpu", "redis"], "a tenant") == {
            "cpu": {"segments": 0, "bytes": 0}, "redis": {"segments": 0, "bytes": 0}, "device": None,
        }  # fmt: skip
        would = await manager.api("would_move", hashes, 1, 0)
        assert (would["source_blocks"], would["target_blocks"], would["blocks"]) == (6, 0, 12)
        assert would["store"] == {"segments": 0}
        assert would["load"] == {"segments": 3, "bytes": 3 * SEGMENT_BYTES}
        assert (await manager.api("would_move", hashes, 0, 7))["refused"] == "no_replica"
        assert (await manager.api("lookup", hashes))["cpu"] == len(hashes)
        assert (await manager.api("compress", hashes))["refused"] == "no_redis"

    with_manager(test)


def test_devices_evict_too_and_one_that_has_nothing_of_it_is_no_failure() -> None:
    async def test(manager: KVManagerActor) -> None:
        hashes, _ = sequence(1, 2)
        await manager.register_replica("second", 1, NODE, list(hashes), EngineFacts(FINGERPRINT))
        outcomes = {REPLICA: "refused_gone", "second": "done"}

        async def obey(replica: str) -> None:
            (order,) = await manager.take_directives(replica, 5.0) or []
            assert list(order.directive.keys) == list(hashes)[::-1], "the end of the sequence first"
            blocks = len(hashes) if outcomes[replica] == "done" else 0
            await manager.acknowledge(order.number, DirectiveResult(Outcome(outcomes[replica]), blocks=blocks))

        asked = hashes, None, None, ["device"]
        assert (await manager.api("evict_prompt", *asked, None, 5.0, True))["device"]["1"] == {"blocks": len(hashes)}
        evicting = asyncio.ensure_future(manager.api("evict_prompt", *asked, None, 5.0, False))
        await asyncio.gather(obey(REPLICA), obey("second"))
        assert await evicting == {"device": {"0": {"blocks": 0}, "1": {"blocks": len(hashes)}}, "outcome": "done"}
        assert (await manager.api("evict_prompt", *asked, 7, 5.0, False))["refused"] == "no_replica"
        outcomes["second"] = "failed"
        evicting = asyncio.ensure_future(manager.api("evict_prompt", *asked, 1, 5.0, False))
        await obey("second")
        failed = await evicting
        assert (failed["outcome"], "message" in failed) == ("failed", True)

    with_manager(test)
