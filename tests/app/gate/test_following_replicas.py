"""Turns come and go with the replicas, where several tenants share them."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from app.gate.admission import AdmissionQueue
from app.gate.fair_shares import FairShares
from configs.settings import load_settings
from load_tests.harness.patience import patience

KEYS = {"api_keys": {"key": "alice", "another": "bob"}}
SCALING = {"replicas": {"min": 1, "max": 3}, "engine": {"max_num_seqs": 4}, "http": KEYS}
TENANTS = ("a", "b", "c")


def places(**args: object) -> int:
    return AdmissionQueue.from_settings(load_settings(args))._turns.capacity


def test_before_anything_is_known_there_are_places_for_the_least() -> None:
    assert places(**SCALING) == 4
    assert places(**{**SCALING, "replicas": 3}) == 12


def test_a_new_replica_takes_what_waits_at_once_and_one_that_goes_ends_no_turn() -> None:
    async def scenario() -> None:
        queue, end = AdmissionQueue.from_settings(load_settings(SCALING)), asyncio.Event()

        async def ask(tenant: str) -> None:
            async with queue.turn(tenant):
                await end.wait()

        asking = [asyncio.create_task(ask(tenant)) for tenant in ("alice", "bob") * 10]
        await asyncio.sleep(0)
        assert (queue.ongoing, queue.waiting) == (4, 16)
        queue.follow(3)
        assert (queue.ongoing, queue.waiting) == (12, 8)
        queue.follow(1)
        await asyncio.sleep(0)
        assert (queue.ongoing, queue.waiting) == (12, 8)
        late = asyncio.create_task(ask("bob"))
        await asyncio.sleep(0)
        assert queue.ongoing == 12
        end.set()
        await asyncio.gather(*asking, late)
        assert (queue.ongoing, queue.waiting, queue._turns.held) == (0, 0, 0)

    asyncio.run(scenario())


def test_a_fixed_number_of_replicas_keeps_its_places_whatever_dies() -> None:
    queue = AdmissionQueue.from_settings(load_settings({**SCALING, "replicas": 3}))
    queue.follow(1)
    assert queue._turns.capacity == 12


def test_one_with_more_answers_than_there_are_places_left_is_not_stuck() -> None:
    async def scenario() -> None:
        queue, end = AdmissionQueue.from_settings(load_settings(SCALING)), asyncio.Event()
        queue.follow(3)

        async def ask(answers: int) -> None:
            async with queue.turn("alice", answers):
                await end.wait()

        first = asyncio.create_task(ask(5))
        await asyncio.sleep(0)
        large = asyncio.create_task(ask(10))
        await asyncio.sleep(0)
        queue.follow(1)
        end.set()
        await asyncio.wait_for(asyncio.gather(first, large), patience(120))

    asyncio.run(scenario())


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(TENANTS), st.integers(-6, 6)), st.tuples(st.just("resize"), st.integers(0, 40))
        ),
        max_size=80,
    )
)
def test_resizing_loses_no_place_and_gives_none_beyond_what_there_is(steps: list[tuple[str, int]]) -> None:
    shares, held = FairShares(12, TENANTS), dict.fromkeys(TENANTS, 0)
    for what, number in steps:
        if what == "resize":
            shares.resize(number)
        elif number < 0:
            back = min(-number, held[what])
            shares.give_back(what, back)
            held[what] -= back
        elif shares.take(what, number):
            held[what] += number
            assert number == 0 or sum(held.values()) <= shares.capacity
    assert shares.held == sum(held.values())
    for tenant, places in held.items():
        shares.give_back(tenant, places)
    for tenant in TENANTS:
        assert shares.take(tenant, shares.slice), "every slice is there again"
