"""Who watches: bounds, scopes, and what a slow one misses."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from app.events import watchers as module
from app.events.watchers import Watchers
from app.gate.auth import Caller
from app.gate.errors import OverloadedError

ALICE, BOB, CAROL, ADMIN = Caller("alice"), Caller("bob"), Caller("carol"), Caller("operator", admin=True)


def test_a_tenant_is_told_of_itself_and_an_administrator_of_all():
    async def scenario() -> None:
        watchers = Watchers()
        with watchers.one_more(ALICE) as alice, watchers.one_more(BOB) as bob, watchers.one_more(ADMIN) as admin:
            watchers.tell("alice", "route", {"id": "1"}, {"tenant": "alice"})
            watchers.tell_admins("directive", {"kind": "evict"})
            assert await alice.next(1) == [("route", {"id": "1"})]
            assert await bob.next(0.01) == []
            told = await admin.next(1)
            assert told == [("route", {"id": "1", "tenant": "alice"}), ("directive", {"kind": "evict"})]

    asyncio.run(scenario())


def test_who_is_slow_loses_the_oldest_and_is_told_how_many(monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 3)

    async def scenario() -> None:
        watchers = Watchers()
        with watchers.one_more(ALICE) as alice:
            for number in range(5):
                watchers.tell("alice", "route", {"id": number}, {})
                alice.show(("cache", {"second": number}))
            told = await alice.next(1)
            routes = [("route", {"id": number}) for number in (2, 3, 4)]
            assert told == [("dropped", {"events": 2}), *routes, ("cache", {"second": 4})]
            assert await alice.next(0.01) == []

    asyncio.run(scenario())


def test_there_are_so_many_and_of_each_tenant_so_many_and_a_place_is_given_back(monkeypatch):
    monkeypatch.setattr(module, "MOST_WATCHERS", 3)
    monkeypatch.setattr(module, "MOST_OF_A_TENANT", 2)

    async def scenario() -> None:
        changes: list[int] = []
        watchers = Watchers(lambda: changes.append(len(watchers)))
        with contextlib.ExitStack() as two:
            two.enter_context(watchers.one_more(ALICE))
            two.enter_context(watchers.one_more(ALICE))
            with pytest.raises(OverloadedError), watchers.one_more(ALICE):
                pass
            with watchers.one_more(BOB), pytest.raises(OverloadedError), watchers.one_more(CAROL):
                pass
        with watchers.one_more(ALICE):
            assert len(watchers) == 1
        assert changes == [1, 2, 3, 2, 1, 0, 1, 0]

    asyncio.run(scenario())


def test_tenants_together_do_not_keep_an_administrator_out(monkeypatch):
    monkeypatch.setattr(module, "MOST_WATCHERS", 2)
    monkeypatch.setattr(module, "MOST_OF_A_TENANT", 1)

    async def scenario() -> None:
        watchers = Watchers()
        with watchers.one_more(ALICE), watchers.one_more(BOB), watchers.one_more(ADMIN):
            assert len(watchers) == 3
            with pytest.raises(OverloadedError), watchers.one_more(ADMIN):
                pass

    asyncio.run(scenario())
