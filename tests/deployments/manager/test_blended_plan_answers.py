"""The manager's actor and blended prompts: chunks in the plan, one lease, and what is stored of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kv_cluster import FINGERPRINT, SEGMENT_BYTES, SIZES, offered, sequence

from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from kvmanager.config import ManagerConfig
from kvmanager.extensions.blend.chunks import BLEND, BlendQuery, BlendTerms, ChunkQuery, PlannedChunk
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlannedLoad, PlanQuery
from load_tests.harness.patience import PATIENCE_S, patience, until_it_holds

NODE, REPLICA = "node", "replica"
BLOCK_TOKENS, SEGMENT_BLOCKS = 32, 4
TERMS = BlendTerms(2, 6)


class Tiers:
    """Stands in for a tier's handle."""

    def __init__(self) -> None:
        self.evicted: list[bytes] = []
        self.evict = self.stats = self

    def remote(self, keys: Any = ()) -> Awaitable[int]:
        self.evicted += keys
        return asyncio.sleep(0, len(keys))


@pytest.fixture
def managed(patient: None) -> Callable[[Callable[[KVManagerActor, Tiers], Awaitable[None]]], None]:
    def run(test: Callable[[KVManagerActor, Tiers], Awaitable[None]]) -> None:
        async def main() -> None:
            manager = KVManagerActor(ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS, extensions=("blend",)))
            tier = Tiers()
            await manager.register_tier(NODE, tier, "life", 20 * SEGMENT_BYTES, [], [])
            await manager.register_replica(REPLICA, 0, NODE, [], EngineFacts(FINGERPRINT))
            await asyncio.wait_for(test(manager, tier), patience(PATIENCE_S))
            manager._housekeeping.cancel()

        asyncio.run(main())

    return run


async def stored(manager: KVManagerActor, seed: int, segments: int) -> list[Any]:
    """The hashes of a sequence that is stored."""
    hashes, spans = sequence(seed, segments)
    offer = await manager.offer(REPLICA, NODE, offered(spans), SIZES)
    assert offer is not None
    await manager.commit(NODE, offer[1], [SEGMENT_BYTES] * len(offer[1]))
    return hashes


def query(*chunks: tuple[int, list[Any]]) -> BlendQuery:
    found = [ChunkQuery(start, len(hashes) * BLOCK_TOKENS + 5, hashes) for start, hashes in chunks]
    return BlendQuery(found, 0.15, TERMS)


async def plan(manager: KVManagerActor, blend: BlendQuery | None) -> Any:
    prompt, _ = sequence(900, 10)
    return await manager.plan(
        REPLICA, NODE, PlanQuery(prompt, prompt_tokens=1300, extras={BLEND: blend} if blend else {})
    )


def test_a_plan_has_the_chunks_the_ratio_and_the_layer(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: Tiers) -> None:
        first, second = await stored(manager, 901, 2), await stored(manager, 902, 3)
        made = await plan(manager, query((40, second), (600, first)))
        assert (made.reason, made.segments) == ("blend", ())
        blend = made.extras[BLEND]
        assert (blend.ratio, blend.check_layer, blend.seconds) == (0.15, 2, 0.0)
        assert [chunk.start_token for chunk in blend.chunks] == [40, 600]
        assert all(isinstance(chunk, PlannedChunk) for chunk in blend.chunks)
        loads = blend.chunks[0].loads
        assert all(isinstance(load, PlannedLoad) for load in loads)
        assert [load.key for load in loads] == [second[3], second[7], second[11]]
        assert [(load.start_block, load.end_block, load.tier) for load in loads] == [
            (0, 4, "cpu"), (4, 8, "cpu"), (8, 12, "cpu"),
        ]  # fmt: skip
        assert made.expected.deadline_s > 0

    managed(check)


def test_without_a_question_or_an_answer_a_plan_has_no_blend(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: Tiers) -> None:
        await stored(manager, 901, 2)
        cold, _ = sequence(903, 6)
        assert not (await plan(manager, None)).extras
        made = await plan(manager, query((40, cold)))
        assert not made.extras
        assert made.reason == "cold"

    managed(check)


def test_the_chunks_stay_until_the_plans_lease_is_released(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: Tiers) -> None:
        hashes = await stored(manager, 901, 5)
        made = await plan(manager, query((40, hashes)))
        assert made.lease_id
        await manager.api("clear", ["cpu"], 0.5)
        assert tier.evicted == []
        await manager.release([made.lease_id])
        manager._tidy(time.monotonic())
        await until_it_holds(lambda: len(tier.evicted) == 5, "its chunks are evicted")
        await manager.release([made.lease_id])
        assert manager._loads.under_way.count(Tier.CPU) == 0

    managed(check)


def test_what_is_stored_of_chunks_is_told_without_a_lease(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: Tiers) -> None:
        hashes = await stored(manager, 901, 2)
        cold, _ = sequence(904, 1)
        assert await manager.api("stored_blocks", [hashes, cold, hashes[:3], []]) == [8, 0, 3, 0]
        assert (await manager.api("stats"))["leases"] == 0
        assert (await manager.api("stats"))["counters"]["plans"] == 0

    managed(check)


def test_blends_that_take_long_are_learned_from_and_nonsense_is_not(managed: Any) -> None:
    async def check(manager: KVManagerActor, tier: Tiers) -> None:
        correction = manager._loads._listeners["blend"]
        await manager.report_rates(REPLICA, [("blend", 0.5, 1.0), ("blend", 0.0, 1.0), ("blend", -1.0, 2.0)])
        learned = correction.factor(REPLICA, 0.0)
        assert 1.0 < learned < 2.0
        await manager.report_rates("stranger", [("blend", 0.5, 8.0)])
        assert correction.factor("stranger", 0.0) == 1.0
        assert (await manager.api("stats"))["counters"]["chunk_tokens_asked"] == 0

    managed(check)
