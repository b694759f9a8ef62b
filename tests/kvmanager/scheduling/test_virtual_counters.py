"""Virtual token counters: what no history may break, and what tenants of a simulated server get."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.scheduling.virtual_counters import (
    ANSWER_COST,
    CACHED_COST,
    Bill,
    ServedWork,
    VirtualCounters,
    prompt_cost,
)


def test_who_was_served_least_by_its_weight_is_next():
    counters = VirtualCounters("abc", {"b": 2.0})
    counters.charge("a", 10)
    counters.charge("b", 18)
    counters.charge("c", 9.5)
    assert counters.in_order("abc") == ["b", "c", "a"]


def test_of_equals_who_had_no_turn_for_the_longest_time_is_next():
    counters = VirtualCounters("abc")
    for tenant in "bca":
        counters.turn(tenant)
    assert counters.in_order("abc") == ["b", "c", "a"]


def test_who_was_idle_has_saved_nothing_up_and_who_was_alone_owes_nothing():
    counters = VirtualCounters("abc")
    counters.begins_to_wait("a", ())
    counters.turn("a")
    counters.charge("a", 1000)
    counters.begins_to_wait("b", ())
    assert counters.counter("b") == counters.counter("a")
    counters.charge("b", 5)
    counters.begins_to_wait("c", ("a", "b"))
    assert counters.counter("c") == 1000
    counters.begins_to_wait("b", ("a", "c"))
    assert counters.counter("b") == 1005


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_an_answer_that_is_paid_for_and_ended_early_saves_nothing_up(weight: float):
    counters = VirtualCounters("ab", {"a": weight})
    counters.begins_to_wait("b", ())
    counters.turn("b")
    held = Bill(counters, "a", ServedWork(0, 0, 1000))
    held.send()
    counters.charge("b", 5000)
    counters.begins_to_wait("a", "b")
    held.sampled(10)
    held.close()
    assert counters.counter("a") == pytest.approx(counters.counter("b") + 10 * ANSWER_COST / weight)


def test_what_others_have_paid_for_and_end_early_costs_a_newcomer_nothing():
    counters = VirtualCounters("ab")
    counters.begins_to_wait("b", ())
    counters.turn("b")
    held = Bill(counters, "b", ServedWork(100, 0, 1000))
    held.send()
    counters.begins_to_wait("a", "b")
    held.close()
    assert counters.counter("a") == counters.counter("b") == 100


def test_a_cached_prompt_is_nearly_free_and_a_sampled_token_counts_twice():
    assert prompt_cost(100, 0) == 100
    assert prompt_cost(100, 90) == pytest.approx(10 + 90 * CACHED_COST)
    assert prompt_cost(100, 1000) == pytest.approx(100 * CACHED_COST)
    assert prompt_cost(100, -5) == 100
    assert ServedWork(100, 90, 50).cost == pytest.approx(prompt_cost(100, 90) + 50 * ANSWER_COST)


def test_a_bill_is_charged_before_the_work_corrected_by_it_and_closed_once():
    counters, closed = VirtualCounters("a"), []
    bill = Bill(counters, "a", ServedWork(100, 60, 10))
    bill.on_close = lambda tenant, cost: closed.append((tenant, cost))
    bill.sampled(5)
    bill.close()
    assert (counters.counter("a"), closed) == (0, [])
    bill.send()
    assert counters.counter("a") == pytest.approx(prompt_cost(100, 60) + 10 * ANSWER_COST)
    bill.prompt_was(0)
    bill.sampled(4)
    assert counters.counter("a") == pytest.approx(100 + 10 * ANSWER_COST)
    bill.sampled(8)
    assert counters.counter("a") == pytest.approx(100 + 12 * ANSWER_COST)
    short = Bill(counters, "a", ServedWork(0, 0, 1000))
    short.on_close = bill.on_close
    short.send()
    short.sampled(1)
    short.close()
    bill.close()
    bill.close()
    bill.sampled(99)
    bill.prompt_was(100)
    assert counters.counter("a") == pytest.approx(100 + 13 * ANSWER_COST)
    assert closed == [("a", ANSWER_COST), ("a", 100 + 12 * ANSWER_COST)]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 999), st.integers(0, 999), st.integers(0, 99)), max_size=50
    )
)
def test_what_bills_charge_is_what_was_served_whatever_was_expected(prompts):
    counters, real = VirtualCounters("abc", {"a": 3.0}), Counter()
    for tenant, size, expected, sampled in prompts:
        bill = Bill(counters, tenant, ServedWork(size, size // 2, expected))
        bill.send()
        bill.prompt_was(size // 3)
        for _ in range(sampled):
            bill.sampled(1)
        bill.close()
        real[tenant] += prompt_cost(size, size // 3) + ANSWER_COST * sampled
    for tenant, weight in (("a", 3.0), ("b", 1.0), ("c", 1.0)):
        assert counters.counter(tenant) == pytest.approx(real[tenant] / weight)


def test_weights_are_above_zero():
    with pytest.raises(ValueError, match="above 0"):
        VirtualCounters("ab", {"a": 0.0})


@dataclass
class Server:
    """Some slots; a request holds one for as long as its cost. Time is in tokens."""

    weights: Mapping[str, float] = field(default_factory=dict)
    slots: int = 8
    now: float = 0.0
    served: list[tuple[float, str, float]] = field(default_factory=list)
    """When each request ended, whose it was, what it cost."""
    waits: dict[str, list[float]] = field(default_factory=dict)
    fair: bool = True

    def run(self, arrivals: list[tuple[float, str, int, int]], until: float) -> None:
        """`arrivals`: when, whose, prompt tokens, answer tokens; what is expected of an answer is wrong."""
        counters, rng = VirtualCounters("ab", self.weights), Random(1)
        lines: dict[str, list[tuple[float, int, int]]] = {}
        running: list[tuple[float, int, str, float, float, Bill]] = []
        queue = sorted(arrivals, reverse=True)
        number = 0
        while self.now < until and (queue or running):
            self.now = min(queue[-1][0] if queue else until, running[0][0] if running else until)
            while queue and queue[-1][0] <= self.now:
                at, tenant, prompt, answer = queue.pop()
                if tenant not in lines:
                    counters.begins_to_wait(tenant, lines.keys())
                lines.setdefault(tenant, []).append((at, prompt, answer))
            while running and running[0][0] <= self.now:
                ended, _, tenant, at, cost, bill = heapq.heappop(running)
                bill.close()
                self.served.append((ended, tenant, cost))
                self.waits.setdefault(tenant, []).append(ended - at)
            while lines and len(running) < self.slots:
                oldest = min(lines, key=lambda tenant: lines[tenant][0])
                tenant = counters.in_order(lines)[0] if self.fair else oldest
                at, prompt, answer = lines[tenant].pop(0)
                if not lines[tenant]:
                    del lines[tenant]
                bill = Bill(counters, tenant, ServedWork(prompt, 0, round(answer * 2 ** rng.gauss(0, 1))))
                bill.send()
                counters.turn(tenant)
                bill.sampled(answer)
                number += 1
                cost = prompt + ANSWER_COST * answer
                heapq.heappush(running, (self.now + cost, number, tenant, at, cost, bill))


def backlog(seed: int) -> list[tuple[float, str, int, int]]:
    """Both tenants ask for more than there is; the requests of one are ten times as large."""
    rng = Random(seed)
    small = [(0.0, "a", rng.randint(5, 100), rng.randint(1, 60)) for _ in range(9000)]
    large = [(0.0, "b", rng.randint(50, 1000), rng.randint(10, 600)) for _ in range(900)]
    return small + large


@pytest.mark.parametrize("weights", [{}, {"a": 2.0}, {"b": 2.0}])
def test_two_tenants_that_always_wait_are_served_by_their_weights_in_any_window(weights: dict[str, float]):
    server = Server(weights)
    server.run(backlog(3), until=150_000)
    window = 30_000.0
    for start in range(10_000, 120_000, 2_000):
        shares = Counter()
        for ended, tenant, cost in server.served:
            if start <= ended < start + window:
                shares[tenant] += cost / weights.get(tenant, 1.0)
        assert shares["a"] == pytest.approx(shares["b"], rel=0.1)


def modest(seed: int) -> list[tuple[float, str, int, int]]:
    """A tenant that asks for a quarter of the slots, at random times."""
    rng, at, found = Random(seed), 0.0, []
    while at < 150_000:
        prompt, answer = rng.randint(20, 200), rng.randint(5, 50)
        found.append((at, "a", prompt, answer))
        at += rng.expovariate(1 / 20.6)  # a request holds one of 32 slots for 165 on average
    return found


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def test_a_modest_tenant_hardly_notices_one_that_floods():
    flood = [(0.0, "b", 100, 20)] * 20_000
    alone, beside, unfair = Server(slots=32), Server(slots=32), Server(slots=32, fair=False)
    alone.run(modest(5), until=150_000)
    beside.run(modest(5) + flood, until=150_000)
    unfair.run(modest(5) + flood, until=150_000)
    assert p95(beside.waits["a"]) <= 1.3 * p95(alone.waits["a"])
    assert p95(unfair.waits["a"]) > 10 * p95(alone.waits["a"])
