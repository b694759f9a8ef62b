"""Evictions of any number reach a tier in order and in chunks, and a slow tier is waited for, not given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from deployments.manager import tier_registry
from deployments.manager.tier_registry import CHUNK_KEYS, EvictionQueue

KEYS = [number.to_bytes(32, "big") for number in range(2 * CHUNK_KEYS + 5)]


class Tier:
    """`handle.evict.remote(keys)`; answers when `may` is set."""

    def __init__(self) -> None:
        self.chunks: list[list[bytes]] = []
        self.may = asyncio.Event()
        self.evict = self

    def remote(self, keys: list[bytes]) -> Awaitable[int]:
        self.chunks.append(keys)
        return self._answer(keys)

    async def _answer(self, keys: list[bytes]) -> int:
        await self.may.wait()
        return len(keys)


def test_many_keys_go_in_chunks_one_after_the_other() -> None:
    async def check() -> None:
        tier, failures = Tier(), list[Exception]()
        queue = EvictionQueue(tier, failures.append)
        queue.add(KEYS[:-3])
        queue.add(KEYS[-3:])
        assert not await queue.settled(0.02)
        assert [len(chunk) for chunk in tier.chunks] == [CHUNK_KEYS], "the second waits for the first"
        tier.may.set()
        assert await queue.settled(10)
        assert [key for chunk in tier.chunks for key in chunk] == KEYS
        assert max(map(len, tier.chunks)) == CHUNK_KEYS
        assert not failures

    asyncio.run(check())


def test_a_tier_that_fails_is_given_up_at_once_and_one_that_hangs_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(tier: Any) -> None:
        failures = list[Exception]()
        queue = EvictionQueue(tier, failures.append)
        queue.add(KEYS[:1])
        assert not await queue.settled(10)
        assert len(failures) == 1
        queue.add(KEYS[1:2])
        assert len(tier.chunks) == 1
        assert len(queue) <= 1

    class Broken(Tier):
        async def _answer(self, keys: list[bytes]) -> int:
            raise RuntimeError("broken in this test")

    monkeypatch.setattr(tier_registry, "EVICTED_S", 0.05)

    async def both() -> None:
        await check(Broken())
        await check(Tier())

    asyncio.run(both())


def test_who_has_lost_its_seat_is_told_nothing_more() -> None:
    async def check() -> None:
        tier = Tier()
        queue = EvictionQueue(tier, lambda error: None)
        queue.add(KEYS)
        await asyncio.sleep(0)
        queue.close()
        tier.may.set()
        assert not await queue.settled(10)
        assert len(tier.chunks) == 1
        assert len(queue) == 0

    asyncio.run(check())
