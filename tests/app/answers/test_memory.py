"""The memory of sampled answers is bounded, and fair."""

from __future__ import annotations

import random
import sys
import tracemalloc

import pytest

from app.answers.memory import MOST_TURNS, AnswerMemory, RememberedTurn
from app.answers.returns import Returns
from app.gate.observed_prompt import Kind

KIND = Kind("a")


def turn(size: int, seed: int = 0) -> RememberedTurn:
    return RememberedTurn(seed.to_bytes(4, "little") + bytes(size), b"", KIND)


def held(memory: AnswerMemory, *tenants: str) -> int:
    owns = [own for name in tenants if (own := memory.of(name)) is not None]
    return sum(own.nbytes for own in owns)


def test_a_looping_client_fills_its_own_share_only():
    memory = AnswerMemory(100_000)
    for number in range(20):
        memory.add("quiet", number.to_bytes(16), turn(1000, number))
    before = held(memory, "quiet")
    for number in range(5000):
        memory.add("loud", number.to_bytes(16), turn(500, number))
        assert memory.nbytes <= 100_000
    assert held(memory, "quiet") == before
    assert memory.forgotten > 4000


def test_of_one_tenant_the_least_recently_used_goes_first():
    memory = AnswerMemory(20_000)
    for number in range(10):
        memory.add("a", number.to_bytes(16), turn(1000, number))
        own = memory.of("a")
        assert own is not None
        assert own.find((0).to_bytes(16)) is not None
    for number in range(10, 20):
        memory.add("a", number.to_bytes(16), turn(1000, number))
        own.find((0).to_bytes(16))
    assert own.find((0).to_bytes(16)) is not None
    assert own.find((1).to_bytes(16)) is None
    assert own.find((19).to_bytes(16)) is not None


def test_a_huge_answer_is_not_remembered():
    memory = AnswerMemory(100_000)
    memory.add("a", bytes(16), turn(20_000))
    assert memory.nbytes == 0


def test_one_prompt_has_so_many_answers_and_those_that_came_back_stay():
    memory = AnswerMemory(1 << 20)
    first = turn(10, 0)
    first.returned = True
    memory.add("a", bytes(16), first)
    for number in range(1, 100):
        memory.add("a", bytes(16), turn(10, number))
        memory.add("a", bytes(16), turn(10, number))  # the same again is one
    own = memory.of("a")
    assert own is not None
    (place,) = own.places.values()
    assert len(place.turns) == MOST_TURNS
    assert place.turns[0] is first


def test_what_it_counts_is_what_it_holds():
    rng = random.Random(7)
    memory = AnswerMemory(60_000)
    for _ in range(3000):
        tenant = rng.choice("abc")
        memory.add(tenant, rng.randrange(40).to_bytes(16), turn(rng.randrange(2000), rng.randrange(1000)))
        own = memory.of(tenant)
        if own is not None and own.places and rng.random() < 0.5:
            place = own.find(rng.choice(list(own.places)))
            assert place is not None
            memory.note_rendered(own, rng.choice(place.turns), bytes(rng.randrange(3000)))
        assert memory.nbytes <= 60_000
    weighed = 0
    for name in "abc":
        own = memory.of(name)
        if own is not None:
            weight = sum(320 + sum(t.nbytes for t in place.turns) for place in own.places.values())
            assert own.nbytes == weight
            weighed += weight
    assert memory.nbytes == weighed


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="what objects weigh is CPython's")
def test_what_python_needs_for_it_is_no_more_than_counted():
    tracemalloc.start()
    try:
        memory = AnswerMemory(1 << 22)
        for number in range(20_000):
            memory.add("a", number.to_bytes(16), turn(100, number))
        assert memory.forgotten > 0
        assert tracemalloc.get_traced_memory()[0] <= memory.nbytes
    finally:
        tracemalloc.stop()


def test_answers_that_never_come_back_are_no_longer_saved_and_again_when_they_do():
    returns = Returns("auto")
    thinking, plain = Kind("a", thinks=True), Kind("a")
    assert returns.worth_saving(thinking)
    for _ in range(60):
        returns.see(thinking, False)
        returns.see(plain, True)
    assert not returns.worth_saving(thinking)
    assert returns.worth_saving(plain)
    assert returns.worth_saving(Kind("b", thinks=True)), "another tenant's clients are others"
    assert returns.worth_saving(None)
    for _ in range(30):
        returns.see(thinking, True)
    assert returns.worth_saving(thinking)


def test_a_few_that_do_not_come_back_change_nothing():
    returns = Returns("auto")
    for number in range(1000):
        returns.see(KIND, number % 3 == 0)
        assert returns.worth_saving(KIND)


def test_always_and_never_do_not_learn():
    always, never = Returns("always"), Returns("never")
    for _ in range(100):
        always.see(KIND, False)
        never.see(KIND, True)
    assert [always.worth_saving(kind) for kind in (KIND, None)] == [True, True]
    assert [never.worth_saving(kind) for kind in (KIND, None)] == [False, False]
