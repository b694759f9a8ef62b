"""The manager shares out roles among those that register, and tells routers and people."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kv_cluster import FINGERPRINT

from deployments.manager import replica_state
from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import NOTHING_SEEN, Position
from kvmanager.routing.roles import RoleShares
from load_tests.harness.patience import patience

NODE = "node"


@pytest.fixture
def managed() -> Callable[[Callable[[KVManagerActor], Awaitable[None]], RoleShares], None]:
    """Runs a test's coroutine with a manager of so many roles."""

    def run(test: Callable[[KVManagerActor], Awaitable[None]], shares: RoleShares) -> None:
        async def main() -> None:
            manager = KVManagerActor(ManagerConfig(blocks_per_segment=4), roles=shares)
            await asyncio.wait_for(test(manager), patience(20))
            manager._housekeeping.cancel()

        asyncio.run(main())

    return run


async def come(manager: KVManagerActor, name: str, rank: int) -> None:
    await manager.register_replica(name, rank, NODE, [], EngineFacts(FINGERPRINT))


async def roles(manager: KVManagerActor) -> dict[str, str]:
    return (await manager.deltas(NOTHING_SEEN, 0.0)).roles


def test_roles_are_told_to_routers_by_name_and_to_people_by_number(managed: Any) -> None:
    async def check(manager: KVManagerActor) -> None:
        await come(manager, "x", 1)
        seen = Position((await manager.deltas(NOTHING_SEEN, 0.0)).deltas.last)
        polling = asyncio.create_task(manager.deltas(seen, 3600.0))
        await asyncio.sleep(0)
        await come(manager, "y", 0)
        told = (await polling).roles
        assert sorted(told.items()) == [("x", told["x"]), ("y", told["y"])]
        assert set(told.values()) == {"prefill", "decode"}
        assert (await manager.api("stats"))["roles"] == {"1": told["x"], "0": told["y"]}

    managed(check, RoleShares(1, 1))


def test_a_role_does_not_follow_serves_numbers(managed: Any) -> None:
    async def check(manager: KVManagerActor) -> None:
        await come(manager, "x", 0)
        await come(manager, "y", 1)
        before = await roles(manager)
        await manager.take_directives("y", 0.0, 0)
        await manager.take_directives("x", 0.0, 1)
        await come(manager, "x", 1)
        assert await roles(manager) == before

    managed(check, RoleShares(1, 1))


def test_one_that_ends_or_falls_silent_is_replaced_in_its_role(managed: Any) -> None:
    async def check(manager: KVManagerActor) -> None:
        for rank, name in enumerate("xyz"):
            await come(manager, name, rank)
        before = await roles(manager)
        await manager.replica_ends("x", "dead")
        await come(manager, "new", 0)
        assert await roles(manager) == {"y": before["y"], "z": before["z"], "new": before["x"]}
        manager._replicas["y"].last_seen -= replica_state.MISSED_POLLS_S + 1
        await come(manager, "newer", 1)
        assert await roles(manager) == {"newer": before["y"], "z": before["z"], "new": before["x"]}

    managed(check, RoleShares(1, 2))


def test_without_roles_nobody_has_one(managed: Any) -> None:
    async def check(manager: KVManagerActor) -> None:
        await come(manager, "x", 0)
        assert await roles(manager) == {}
        assert (await manager.api("stats"))["roles"] == {}

    managed(check, RoleShares())
