"""The speculation's loop on the manager's event loop: what it hears, what it orders, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import speculator
from deployments.speculator import MOST_AT_ONCE, SpeculationLoop
from kvmanager.directives import Outcome
from kvmanager.keys import BlockHash
from kvmanager.speculation_orders import SpeculationSetting

REPLICA = "replica"
EVERY_TURN = SpeculationSetting(least_probability=0.0, retry_s=0.05, order_s=0.5)


def blocks(name: str, count: int) -> list[BlockHash]:
    return [BlockHash(f"{name}/{number}".encode().ljust(32, b".")) for number in range(count)]


class FakeDirection:
    """Stands in for `deployments.direction.Direction`, and for the devices: what is promoted is there at once."""

    def __init__(self) -> None:
        self.device: dict[str, set[BlockHash]] = defaultdict(set)
        self.given: list[tuple[str, str, list[BlockHash]]] = []
        self.outcome: Outcome | Exception = Outcome.DONE
        self.takes_s = 0.0
        self.under_way = self.most_under_way = 0

    def device_blocks(self, replica: str, hashes: Any) -> int:
        return next((n for n, block in enumerate(hashes) if block not in self.device[replica]), len(hashes))

    async def pin(self, replica: str, hashes: Any, ttl_s: float, deadline_s: float) -> Any:
        return await self._give("pin", replica, hashes, deadline_s)

    async def unpin(self, replica: str, hashes: Any, deadline_s: float) -> Any:
        return await self._give("unpin", replica, hashes, deadline_s)

    async def promote(self, replica: str, hashes: Any, deadline_s: float) -> Any:
        ended = await self._give("promote", replica, hashes, deadline_s)
        if ended.outcome is Outcome.DONE:
            self.device[replica].update(hashes)
        return ended

    async def _give(self, kind: str, replica: str, hashes: Any, deadline_s: float) -> Any:
        assert 0 < deadline_s <= EVERY_TURN.order_s
        self.given.append((kind, replica, list(hashes)))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self.takes_s)
        self.under_way -= 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return SimpleNamespace(outcome=self.outcome)

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.given]


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test's coroutine with a loop that decides often, over one replica with 100 blocks and a budget of 50."""
    monkeypatch.setattr(speculator, "DECIDE_S", 0.01)

    def run(test: Callable[[SpeculationLoop, FakeDirection], Awaitable[None]], budget_share: float = 0.5) -> None:
        async def main() -> None:
            direction = FakeDirection()
            loop = SpeculationLoop(direction, direction.device_blocks, lambda replica: 100, budget_share, EVERY_TURN)
            loop.seen(REPLICA)
            loop.stored(num_blocks=4, nbytes=4000)
            try:
                await asyncio.wait_for(test(loop, direction), 20)
            finally:
                loop.close()

        asyncio.run(main())

    return run


async def soon(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nothing announces what the loop does
        await asyncio.sleep(0.005)


def test_what_left_the_device_is_promoted_pinned_and_found_by_the_next_turn(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        talk = blocks("talk", 4)
        loop.answered(REPLICA, talk, 3)
        await soon(lambda: "pin" in direction.kinds())
        assert direction.given == [("promote", REPLICA, talk), ("pin", REPLICA, talk)]
        loop.plan_asked(REPLICA, talk + blocks("question", 1))
        report = loop.report()
        assert (report["found"], report["used"], report["missed"]) == (1, 1, 0)

    speculating(check)


def test_a_refusal_is_counted_and_tried_again_later(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        direction.outcome = Outcome.REFUSED_GONE
        loop.answered(REPLICA, blocks("talk", 4), 4)
        await soon(lambda: loop.report()["refused"] == 1)
        direction.outcome = Outcome.DONE
        await soon(lambda: loop.report()["promoted"] == 1)
        assert direction.kinds()[:2] == ["promote", "promote"]

    speculating(check)


def test_an_order_that_breaks_off_is_counted_and_the_loop_goes_on(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        direction.outcome = RuntimeError("a bug")
        loop.answered(REPLICA, blocks("talk", 4), 4)
        await soon(lambda: loop.failures > 0)
        assert loop.report()["refused"] > 0
        direction.outcome = Outcome.DONE
        await soon(lambda: loop.report()["promoted"] == 1)

    speculating(check)


def test_few_orders_are_under_way_at_once_and_what_waits_too_long_is_refused_as_late(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        direction.takes_s = EVERY_TURN.order_s
        for number in range(3 * MOST_AT_ONCE):
            loop.answered(REPLICA, blocks(f"talk {number}", 1), 1)
        await soon(lambda: loop.report()["refused"] >= MOST_AT_ONCE)
        assert direction.most_under_way == MOST_AT_ONCE
        assert loop.report()["promoted"] >= MOST_AT_ONCE
        assert loop.failures == 0

    speculating(check)


def test_pins_end_when_the_turn_has_begun(speculating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager.speculation.UNPIN_AFTER_S", 0.02)

    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        talk = blocks("talk", 4)
        direction.device[REPLICA].update(talk)
        loop.answered(REPLICA, talk, 4)
        await soon(lambda: loop.report()["pinned"] == 1)
        loop.plan_asked(REPLICA, talk)
        await soon(lambda: len(direction.given) == 2)
        assert direction.given[-1] == ("unpin", REPLICA, talk)

    speculating(check)


def test_the_budget_is_a_share_of_the_most_blocks_that_a_device_held(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        loop.answered(REPLICA, blocks("too large", 51), 51)
        loop.answered(REPLICA, blocks("fits", 40), 40)
        await soon(lambda: loop.report()["pinned"] == 1)
        assert {len(hashes) for _, _, hashes in direction.given} == {40}
        assert loop.report()["wanted_blocks"] == {REPLICA: 40}

    speculating(check)


def test_a_replica_that_is_gone_is_asked_for_nothing_until_it_is_seen_again(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        loop.forget_replica(REPLICA)
        loop.answered(REPLICA, blocks("talk", 4), 4)
        await asyncio.sleep(0.1)
        assert direction.given == []
        loop.seen(REPLICA)
        loop.answered(REPLICA, blocks("another", 4), 4)
        await soon(lambda: direction.given != [])

    speculating(check)


def test_after_a_clear_nothing_is_brought_back(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        loop.answered(REPLICA, blocks("talk", 4), 4)
        loop.clear()
        await asyncio.sleep(0.05)
        assert direction.given == []
        assert loop.report()["conversations"] == 0

    speculating(check)


def test_without_a_budget_nothing_is_remembered_and_nothing_ordered(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        loop.answered(REPLICA, blocks("talk", 4), 4)
        loop.plan_asked(REPLICA, blocks("talk", 4))
        await asyncio.sleep(0.05)
        report = loop.report()
        assert (report["enabled"], report["conversations"], report["next_turns"]) == (False, 0, 0)
        assert direction.given == []

    speculating(check, budget_share=0.0)


def test_what_it_is_told_never_raises(speculating: Any) -> None:
    async def check(loop: SpeculationLoop, direction: FakeDirection) -> None:
        loop.answered(REPLICA, [1, 2], 1)  # type: ignore[list-item]
        loop.plan_asked(REPLICA, 7)  # type: ignore[arg-type]
        loop.answered(REPLICA, [], 0)
        assert loop.failures == 1

    speculating(check)
