"""Fair shares and turns: what no tenant can take from another, over random histories."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gate.fair_shares import FairLine, FairShares
from kvmanager.scheduling.virtual_counters import VirtualCounters
from tests.quantities import up_to

TENANTS = ("a", "b", "c")
STEPS = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(-6, 6)), max_size=80)


@given(capacity=st.integers(3, 40), share=up_to(1.0), steps=STEPS)
def test_nobody_holds_more_than_there_is_and_every_slice_can_be_taken(capacity: int, share: float, steps: list) -> None:
    shares = FairShares(capacity, TENANTS, share)
    held = Counter(dict.fromkeys(TENANTS, 0))
    for tenant, places in steps:
        if places >= 0:
            room = shares.room(tenant)
            assert shares.take(tenant, places) == (places <= room)
            held[tenant] += places if places <= room else 0
        else:
            back = min(-places, held[tenant])
            shares.give_back(tenant, back)
            held[tenant] -= back
        assert shares.held == held.total() <= capacity
        for one in TENANTS:
            assert held[one] <= shares.most
            assert shares.room(one) >= max(0, shares.slice - held[one])


def test_a_tenant_that_is_alone_takes_all_but_the_others_slices_and_a_newcomer_finds_room_at_once():
    shares = FairShares(768, TENANTS)
    while shares.take("a", 1):
        pass
    assert shares.held_by("a") == shares.most == 768 - 2 * 128
    assert shares.take("b", 128)
    assert shares.take("c", 128)
    assert not shares.take("b", 1)
    assert shares.held == 768


def test_without_tenants_there_is_one_that_has_it_all():
    shares = FairShares(768)
    assert shares.take("", 768)
    assert not shares.take("", 1)


def test_more_tenants_than_places_are_refused():
    with pytest.raises(ValueError, match="make at least 3"):
        FairShares(2, TENANTS)


def turns(line: FairLine[str]) -> list[str]:
    """Who gets a turn now, in order."""
    given_to = []
    while (turn := line.next()) is not None:
        given_to.append(turn[0])
    return given_to


def test_turns_that_cost_nothing_go_round_over_the_tenants_and_within_one_in_order():
    shares = FairShares(30, TENANTS)
    line: FairLine[str] = FairLine(shares, VirtualCounters(TENANTS))
    for one in ("a1", "a2", "a3", "a4", "b1", "b2", "c1", "a5"):
        line.join(one[0], one, 1)
    assert turns(line) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5"]


def test_the_next_turn_is_that_of_the_tenant_that_was_served_least():
    counters = VirtualCounters(TENANTS, {"b": 4.0})
    line: FairLine[str] = FairLine(FairShares(30, TENANTS), counters)
    for one in ("a1", "a2", "a3", "b1", "b2", "b3", "b4", "b5"):
        line.join(one[0], one, 1)
    order = []
    while (turn := line.next()) is not None:
        order.append(turn[0])
        counters.charge(turn[0][0], 100)
    assert order == ["a1", "b1", "b2", "b3", "b4", "a2", "b5", "a3"]


def test_short_work_goes_first_where_it_shall_and_long_work_is_not_overtaken_for_ever():
    shares, counters = FairShares(1, ("a",)), VirtualCounters("a")
    line: FairLine[str] = FairLine(shares, counters, shortest=True)
    line.join("a", "long", 1, 100)
    line.join("a", "short", 1, 1)
    assert turns(line) == ["short"]
    for number in range(1000):
        line.join("a", f"later{number}", 1, 10)
        shares.give_back("a", 1)
        counters.charge("a", 10)
        if turns(line) == ["long"]:
            break
    assert 30 < number < 50


def test_without_an_order_by_length_who_came_first_is_first_whatever_it_costs():
    line: FairLine[str] = FairLine(FairShares(9, ("a",)), VirtualCounters("a"))
    line.join("a", "long", 1, 100)
    line.join("a", "short", 1, 1)
    assert turns(line) == ["long", "short"]


def test_who_joins_and_leaves_all_the_time_fills_no_memory():
    shares = FairShares(1, ("a",))
    line: FairLine[str] = FairLine(shares, VirtualCounters("a"))
    for one in ("running", "head"):
        line.join("a", one, 1)
    assert turns(line) == ["running"]
    for number in range(1000):
        line.join("a", f"a{number}", 1)
        line.leave("a", f"a{number}")
    assert len(line._lines["a"]._heap) < 30
    shares.give_back("a", 1)
    assert turns(line) == ["head"]


def test_who_comes_late_waits_for_one_round_and_not_for_the_whole_line():
    shares = FairShares(4, ("a", "b"))
    line: FairLine[str] = FairLine(shares, VirtualCounters(TENANTS))
    for number in range(100):
        line.join("a", f"a{number}", 1)
    assert turns(line) == ["a0", "a1", "a2"]
    line.join("b", "b0", 1)
    line.join("b", "b1", 1)
    assert turns(line) == ["b0"]
    shares.give_back("a", 2)
    assert turns(line) == ["a3", "b1"]


def test_a_large_turn_is_not_overtaken_for_ever_by_small_ones():
    shares = FairShares(10, ("a", "b"), 0.2)
    line: FairLine[str] = FairLine(shares, VirtualCounters(TENANTS))
    for number in range(30):
        line.join("a", f"a{number}", 1)
    turns(line)
    line.join("b", "large", 8)
    for _ in range(9):
        if "large" in turns(line):
            break
        shares.give_back("a", 1)
    else:
        pytest.fail("overtaken for ever")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.sampled_from(TENANTS), st.integers(1, 9)),
            st.tuples(st.sampled_from(["leave", "end"]), st.integers(0, 99), st.just(0)),
        ),
        max_size=60,
    )
)
def test_nobody_is_lost_in_the_line_and_it_empties_when_turns_end(steps: list) -> None:
    shares = FairShares(8, TENANTS, 0.5)
    line: FairLine[tuple[str, int]] = FairLine(shares, VirtualCounters(TENANTS))
    waiting: list[tuple[str, int]] = []
    running: list[tuple[tuple[str, int], int]] = []

    def grant() -> None:
        while (turn := line.next()) is not None:
            waiting.remove(turn[0])
            running.append(turn)

    for number, (step, first, places) in enumerate(steps):
        if step == "join":
            one = (first, number)
            line.join(first, one, places)
            waiting.append(one)
        elif step == "leave" and waiting:
            one = waiting.pop(first % len(waiting))
            line.leave(one[0], one)
        elif step == "end" and running:
            (tenant, _), held = running.pop(first % len(running))
            shares.give_back(tenant, held)
        grant()
        assert len(line) == len(waiting)
        assert shares.held == sum(held for _, held in running)
        if not running:
            assert not waiting
    while running:
        (tenant, _), held = running.pop(0)
        shares.give_back(tenant, held)
        grant()
    assert not waiting
