"""What a router is told that asks for a snapshot while as many as may be are told to others."""

from __future__ import annotations

import asyncio
import collections
from typing import Any, cast

import pytest

from deployments.manager.config import load_choice
from deployments.manager.index_watch import IndexWatch
from deployments.manager.reports import Reports
from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import NOTHING_SEEN, Position
from kvmanager.index.snapshots import MOST_AT_ONCE, MOST_TOLD
from kvmanager.manager import KVManager
from kvmanager.routing.roles import RoleBook, RoleShares
from kvmanager.segments.keys import BlockHash
from load_tests.harness.patience import patience

WAIT_S = 60.0


async def busy() -> tuple[KVManager, Reports, Position]:
    """A manager that tells as many snapshots as it may, and where one of them is."""
    config, unused = ManagerConfig(1, max_deltas=1), cast(Any, None)
    brain = KVManager(config, epoch=1)
    for replica in ("a", "b"):
        brain.device_stored(replica, [BlockHash(number.to_bytes(32, "big")) for number in range(MOST_TOLD)])
    for _ in range(MOST_AT_ONCE):
        deltas = brain.deltas_since(NOTHING_SEEN, 1)
    assert deltas.part is not None
    news = Reports(
        brain, {}, collections.Counter(), RoleBook(RoleShares(0, 0)), load_choice(config), unused, unused,
        IndexWatch(brain, lambda directives: None),
    )  # fmt: skip
    return brain, news, Position(deltas.last, deltas.part.snapshot_id, 1)


def test_a_router_is_told_a_snapshot_as_soon_as_another_ones_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    async def check() -> None:
        brain, news, other = await busy()
        slept = asyncio.sleep

        async def pause(seconds: float) -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                last = brain.deltas_since(other, 1).part
                assert last is not None
                assert last.last
            await slept(0)

        monkeypatch.setattr(asyncio, "sleep", pause)
        async with asyncio.timeout(patience(WAIT_S)):
            found = await news.router_news(NOTHING_SEEN, WAIT_S)
        assert found.deltas.part.number == 0

    asyncio.run(check())
    assert looks == 3


def test_a_router_whose_turn_does_not_come_is_told_to_ask_again() -> None:
    async def check() -> None:
        _, news, _ = await busy()
        found = await news.router_news(NOTHING_SEEN, 0.0)
        assert found.deltas.waits

    asyncio.run(check())
