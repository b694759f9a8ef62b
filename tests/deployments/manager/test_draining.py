"""A replica that Serve takes away: what only its device has is copied at once, and its good-bye is no death."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kv_cluster import FINGERPRINT, SEGMENT_BYTES, SIZES, offered, sequence

from deployments.manager import actor
from deployments.manager.actor import KVManagerActor
from deployments.manager.directive_sender import MOST_OFFLOADED
from deployments.protocol.engine_facts import EngineFacts
from kvmanager.config import ManagerConfig
from kvmanager.moves.directives import Offload
from kvmanager.moves.plan import PlanQuery
from load_tests.harness.patience import patience

NODE, LEAVING, STAYING = "node", "leaving", "staying"
SEGMENTS = MOST_OFFLOADED + 4


class SilentTier:
    """Stands in for a tier's actor handle: evicts at once."""

    def __init__(self) -> None:
        self.evict = self.stats = self

    def remote(self, keys: Any = ()) -> Awaitable[int]:
        return asyncio.sleep(0, len(keys))


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test with a manager of two replicas with one hot prompt on both devices, and in no tier any more.

    Its housekeeping does nothing unless the test calls it.
    """
    monkeypatch.setattr(actor, "EVERY_S", 3600.0)

    def run(test: Callable[[KVManagerActor], Awaitable[None]]) -> None:
        async def main() -> None:
            manager = KVManagerActor(ManagerConfig(blocks_per_segment=4))
            hashes, spans = sequence(77, SEGMENTS)
            await manager.register_tier(NODE, SilentTier(), "life", 1 << 40, [], [])
            for rank, name in enumerate((LEAVING, STAYING)):
                await manager.register_replica(name, rank, NODE, hashes, EngineFacts(FINGERPRINT))
                await manager.plan(name, NODE, PlanQuery(hashes))
                granted = await manager.offer(name, NODE, offered(spans), SIZES)
                assert granted is not None
                await manager.commit(NODE, granted[1], [SEGMENT_BYTES] * len(granted[1]))
            manager._prompts.release(list(range(10)))
            await manager.register_tier(NODE, SilentTier(), "another life", 1 << 40, [], [])
            manager._directives._takes_segments = {NODE: True}
            await asyncio.wait_for(test(manager), patience(20))
            manager._housekeeping.cancel()

        asyncio.run(main())

    return run


async def ordered(manager: KVManagerActor, replica: str) -> list[int]:
    """How many segments each offload has that a replica was ordered to do."""
    taken = await manager.take_directives(replica, 0.05)
    assert taken is not None
    assert all(isinstance(order.directive, Offload) for order in taken)
    return [len(order.directive.spans) for order in taken if isinstance(order.directive, Offload)]


def test_what_is_hot_there_is_copied_as_soon_as_serve_sends_it_nothing_more(managed: Callable[..., None]) -> None:
    async def check(manager: KVManagerActor) -> None:
        await manager.api("drain", [LEAVING, "unknown"], [STAYING])
        await asyncio.sleep(0)
        assert await ordered(manager, LEAVING) == [SEGMENTS], "the whole chain, not a few segments of it"
        assert await ordered(manager, STAYING) == []
        assert manager._replicas[LEAVING].drains

    managed(check)


def test_one_that_serve_runs_after_all_is_as_all_others(managed: Callable[..., None]) -> None:
    async def check(manager: KVManagerActor) -> None:
        await manager.api("drain", [LEAVING], [STAYING])
        await manager.api("drain", [], [STAYING, LEAVING])
        assert not manager._replicas[LEAVING].drains

    managed(check)


def test_a_good_bye_is_no_death_and_gives_all_back(managed: Callable[..., None]) -> None:
    async def check(manager: KVManagerActor) -> None:
        hashes, _ = sequence(77, SEGMENTS)
        await manager.replica_ends(LEAVING)
        await manager.replica_ends(LEAVING)
        assert set(manager._replicas) == {STAYING}
        assert dict(manager._ended) == {"dead": 0, "hung": 0}
        assert manager._brain.offloads.device_blocks(LEAVING, hashes) == 0
        assert manager._brain.offloads.device_blocks(STAYING, hashes) == len(hashes)
        assert len(manager._tiers.cpu) == 1, "its node's tier lives on"

    managed(check)


def test_leases_of_one_that_leaves_are_given_back(managed: Callable[..., None]) -> None:
    async def check(manager: KVManagerActor) -> None:
        hashes, spans = sequence(78, 2)
        await manager.plan(STAYING, NODE, PlanQuery(hashes))
        granted = await manager.offer(STAYING, NODE, offered(spans), SIZES)
        assert granted is not None
        await manager.commit(NODE, granted[1], [SEGMENT_BYTES] * len(granted[1]))
        before = manager._brain.stats(0.0)["leases"]
        await manager.plan(LEAVING, NODE, PlanQuery(hashes))
        assert manager._brain.stats(0.0)["leases"] == before + 1
        await manager.replica_ends(LEAVING)
        assert manager._brain.stats(0.0)["leases"] == before

    managed(check)
