"""The books of directives: each is counted once, whoever forgets it."""

from __future__ import annotations

import random

import pytest

from kvmanager.moves.directive_ledger import DirectiveLedger
from kvmanager.moves.directives import DirectiveKind, Outcome
from kvmanager.moves.leases import Numbers

ONBOARD, EVICT = DirectiveKind.ONBOARD, DirectiveKind.EVICT
GRACE_S = 2.0


@pytest.fixture
def director() -> DirectiveLedger:
    return DirectiveLedger(GRACE_S, Numbers(1), most_in_flight=2)


def begun(director: DirectiveLedger, kind: DirectiveKind = ONBOARD, replica: str = "a", deadline: float = 10.0) -> int:
    order_id = director.begin(0.0, kind, replica, deadline)
    assert not isinstance(order_id, Outcome)
    return order_id


def test_an_acknowledged_directive_is_counted_with_what_it_did(director: DirectiveLedger) -> None:
    assert director.acknowledge(begun(director), Outcome.DONE, blocks=12, step_s=0.002)
    assert director.acknowledge(begun(director), Outcome.FAILED, blocks=4, step_s=0.001)
    assert director.report() == {
        "in_flight": 0,
        "outcomes": {"promote": {"done": 1, "failed": 1}},
        "blocks": {"promote": 16},
        "worst_step_s": {"promote": 0.002},
    }


def test_what_comes_too_late_is_not_begun(director: DirectiveLedger) -> None:
    assert director.begin(10.0, ONBOARD, "a", 10.0) is Outcome.REFUSED_LATE
    assert len(director) == 0
    assert director.report()["outcomes"] == {"promote": {"refused_late": 1}}


def test_a_replica_has_no_more_than_its_bound_to_do(director: DirectiveLedger) -> None:
    first = begun(director)
    begun(director, EVICT)
    assert director.begin(0.0, EVICT, "a", 10.0) is Outcome.REFUSED_FULL
    assert director.in_flight_at("a") == 2
    begun(director, replica="b")
    director.acknowledge(first, Outcome.DONE)
    begun(director)


def test_what_nobody_acknowledges_is_lost_when_the_grace_is_over(director: DirectiveLedger) -> None:
    early, late = begun(director, deadline=10.0), begun(director, deadline=20.0)
    assert director.expire(10.0 + GRACE_S - 0.1) == []
    assert director.expire(10.0 + GRACE_S) == [early]
    assert not director.acknowledge(early, Outcome.DONE), "it is given up already"
    assert director.in_flight_at("a") == 1
    assert director.acknowledge(late, Outcome.DONE)
    assert director.report()["outcomes"] == {"promote": {"done": 1, "lost": 1}}


def test_a_replica_that_is_gone_loses_what_it_had_to_do_and_no_other_does(director: DirectiveLedger) -> None:
    gone, kept = begun(director), begun(director, replica="b")
    assert director.forget_replica("a") == [gone]
    assert director.forget_replica("a") == []
    assert director.acknowledge(kept, Outcome.DONE)
    begun(director)
    begun(director)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_each_directive_is_counted_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    director = DirectiveLedger(GRACE_S, Numbers(1), most_in_flight=3)
    asked, now, ids = 0, 0.0, [0]
    for _ in range(2000):
        now += draw.random()
        action = draw.randrange(4)
        if action < 2:
            asked += 1
            kind = draw.choice(list(DirectiveKind))
            order_id = director.begin(now, kind, draw.choice("abc"), now + draw.uniform(-1, 10))
            ids += [] if isinstance(order_id, Outcome) else [order_id]
        elif action == 2:
            director.acknowledge(draw.choice(ids[-20:]), draw.choice(list(Outcome)))
        elif draw.random() < 0.1:
            director.forget_replica(draw.choice("abc"))
        else:
            director.expire(now)
        counted = sum(sum(outcomes.values()) for outcomes in director.report()["outcomes"].values())
        assert counted + len(director) == asked
        assert sum(director.in_flight_at(replica) for replica in "abc") == len(director)
        assert max(director.in_flight_at(replica) for replica in "abc") <= 3
