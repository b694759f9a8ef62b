"""Who watches: bounds, scopes, and what a slow one misses."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from app.events import watchers as module
from app.events.watchers import HEARTBEAT_S, LONGEST_S, Event, Watchers, events_of
from app.gate.auth import Caller
from app.gate.errors import OverloadedError, UnavailableError

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


class Waiting:
    """A watcher in place of one, whose waits take a passed-in clock's time: `busy`, or as long as it may wait."""

    def __init__(self, busy_s: float | None) -> None:
        self.now = 1000.0
        self.busy_s = busy_s
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now

    async def next(self, timeout_s: float) -> list[Event]:
        self.waits.append(timeout_s)
        self.now += timeout_s if self.busy_s is None else min(self.busy_s, timeout_s)
        return [] if self.busy_s is None or self.busy_s > timeout_s else [("cache", {"n": len(self.waits)})]


@pytest.mark.parametrize("busy_s", [None, 0.7, 7.0])
def test_a_stream_ends_with_its_hour_whether_it_is_quiet_or_busy(busy_s):
    waiting = Waiting(busy_s)

    async def watch() -> list[str]:
        return [event async for event in events_of(waiting, waiting.clock)]

    events = asyncio.run(watch())
    assert waiting.now == pytest.approx(1000 + LONGEST_S)
    assert max(waiting.waits) == HEARTBEAT_S
    assert len(events) == 1 + len(waiting.waits)
    assert ("event: cache" in events[-2]) is (busy_s is not None)


def test_a_client_that_does_not_read_gives_its_place_back_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_S", 0.02)
    monkeypatch.setattr(module, "UNREAD_S", 0.02)

    async def scenario() -> None:
        watchers = Watchers()
        held = contextlib.ExitStack()
        watched = module._Watched(held.enter_context(watchers.one_more(ALICE)), held, lambda: 0.0)
        never = asyncio.Event()

        async def wait_for_ever(*message: object) -> None:
            await never.wait()

        assert len(watchers) == 1
        await watched({"type": "http", "asgi": {"spec_version": "2.4"}}, wait_for_ever, wait_for_ever)
        assert len(watchers) == 0

    asyncio.run(scenario())


def test_a_server_that_ends_lets_its_watchers_go_at_once_and_takes_no_more():
    async def scenario() -> None:
        watchers = Watchers()
        with watchers.one_more(ALICE) as alice, watchers.one_more(ADMIN) as admin:
            alice.tell(("route", {"id": "1"}))
            admin.show(("cache", {}))
            streams = [events_of(one, lambda: 0.0) for one in (alice, admin)]
            for stream in streams:
                await anext(stream)
            watchers.end()
            told = [[event async for event in stream] for stream in streams]
            with pytest.raises(UnavailableError, match="restarting"), watchers.one_more(BOB):
                pass
        last = "event: restarting\ndata: {}\n\n"
        assert ["".join(events).endswith(last) for events in told] == [True, True]
        assert "route" in told[0][0]

    asyncio.run(scenario())
