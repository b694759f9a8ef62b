"""Orders of several tenants: whose turn it is, and who has no more room."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmanager.index import demotion_queue
from kvmanager.index.demotion_queue import Ordered


def nodes(tenant: str, *numbers: int) -> list[Any]:
    return [SimpleNamespace(key=f"{tenant}{number}".encode(), tenant=tenant) for number in numbers]


def taken(queue: Ordered) -> list[str]:
    keys = []
    while len(queue):
        keys.append(queue.first().decode())
        queue.pop()
    return keys


def test_tenants_take_turns_whoever_has_ordered_more():
    queue = Ordered()
    queue.add(nodes("a", 1, 2, 3, 1))
    queue.add(nodes("b", 1))
    queue.add(nodes("c", 1, 2))
    assert taken(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_one_that_fills_the_queue_makes_room_for_another(monkeypatch):
    monkeypatch.setattr(demotion_queue, "MOST_ORDERED", 4)
    queue = Ordered()
    queue.add(nodes("a", 1, 2, 3, 4, 5, 6))
    assert len(queue) == 4
    queue.add(nodes("b", 1, 2, 3))
    assert taken(queue) == ["a1", "b1", "a2", "b2"]


ORDERS = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6)), max_size=8)


@given(ORDERS, st.integers(0, 9))
def test_its_room_is_bounded_and_each_has_its_part_of_it(orders, pops):
    most, demotion_queue.MOST_ORDERED = demotion_queue.MOST_ORDERED, 6
    try:
        queue = Ordered()
        asked: dict[str, list[str]] = {}
        for tenant, numbers in orders:
            queue.add(nodes(tenant, *numbers))
            asked[tenant] = list(dict.fromkeys([*asked.get(tenant, []), *(f"{tenant}{number}" for number in numbers)]))
        held = Counter(key.decode()[0] for key in queue.waiting)
        assert len(queue) == min(6, sum(map(len, asked.values()))) == sum(held.values())
        for tenant, keys in asked.items():
            assert held[tenant] >= min(len(keys), 6 // 3)
        for _ in range(min(pops, len(queue))):
            queue.pop()
        found = taken(queue)
        for tenant in asked:
            own = [key for key in found if key.startswith(tenant)]
            assert own == [key for key in asked[tenant] if key in own], "first in, first out"
    finally:
        demotion_queue.MOST_ORDERED = most
