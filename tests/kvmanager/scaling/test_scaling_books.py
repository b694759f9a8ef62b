"""What is kept beside the policy: the rate of prefill, the last decision, and how many replicas are missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.scaling.book import LAG_S, OLD_S, ScalingBook, WantedReplicas
from kvmanager.scaling.demand import PrefillRate


def test_a_queue_takes_its_tokens_at_the_rate_of_those_computed_last() -> None:
    rate = PrefillRate()
    assert (rate.seconds(0), rate.seconds(100)) == (0.0, None)
    rate.computed(1000, 1.0)
    assert rate.seconds(500) == pytest.approx(0.5)
    for _ in range(200):
        rate.computed(1000, 4.0)
    assert rate.seconds(500) == pytest.approx(2.0, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e4)), min_size=1, max_size=50))
def test_a_rate_lies_between_the_slowest_and_the_fastest_prompt(samples: list[tuple[int, float]]) -> None:
    rate = PrefillRate()
    for tokens, seconds in samples:
        rate.computed(tokens, seconds)
    each = [seconds / tokens for tokens, seconds in samples]
    found = rate.seconds(1)
    assert found is not None
    assert min(each) * 0.999 <= found <= max(each) * 1.001


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (-5, 1.0), (10, 0.0), (10, -1.0), (10, float("nan"))])
def test_a_sample_that_cannot_be_changes_no_rate(tokens: int, seconds: float) -> None:
    rate = PrefillRate()
    rate.computed(100, 1.0)
    rate.computed(tokens, seconds)
    assert rate.seconds(100) == pytest.approx(1.0)


def test_the_book_says_what_was_decided_last_and_why_serve_changed_its_aim() -> None:
    book = ScalingBook()
    assert book.report(0.0) == {}
    book.hear(1.0, 1, 1, 1, "enough", {"ongoing": 0.2})
    book.hear(2.0, 2, 1, 1, "kv_pressure", {"kv_pressure": 1.2})
    book.hear(32.0, 2, 2, 1, "enough", {"kv_pressure": 1.2})
    book.hear(33.0, 1, 2, 2, "fits", {"kv_pressure": 0.2})
    book.hear(40.0, 1, 1, 1, "enough", {"kv_pressure": 0.2})
    assert book.report(41.0) == {
        "desired": 1,
        "target": 1,
        "running": 1,
        "why": "enough",
        "demands": {"kv_pressure": 0.2},
        "changes": [("up", "kv_pressure", 1), ("down", "fits", 1)],
    }
    assert book.report(41.0 + OLD_S) == {}


def test_one_that_is_still_started_is_not_missing_and_one_that_was_there_is() -> None:
    wanted = WantedReplicas(1)
    assert wanted.now(0.0, 1, 1, 1) == 1
    assert wanted.now(1.0, 3, 1, 1) == 1, "two more are being started"
    assert wanted.now(2.0, 3, 1, 3) == 1, "and have not introduced themselves yet"
    assert wanted.now(3.0, 3, 3, 3) == 3 - 2, "enough is enough"
    assert wanted.now(50.0, 3, 2, 3) == 1, "it may have been taken away"
    assert wanted.now(50.0 + LAG_S, 3, 2, 3) == 3, "but Serve has not noticed a death"
    assert wanted.now(51.0 + LAG_S, 3, 2, 2) == 3, "and now replaces it"
    assert wanted.now(52.0 + LAG_S, 3, 3, 3) == 1


def test_one_that_starts_and_is_never_heard_of_is_missing() -> None:
    wanted = WantedReplicas(1)
    assert wanted.now(0.0, 2, 1, 1) == 1
    assert wanted.now(1.0, 2, 1, 2) == 1
    assert wanted.now(1.0 + 2 * LAG_S, 2, 1, 2) == 2


def test_one_that_is_taken_away_is_not_missing_before_the_new_aim_is_heard_of_nor_after() -> None:
    wanted = WantedReplicas(1)
    for at, target, living in ((0.0, 2, 2), (1.0, 2, 1), (1.0 + LAG_S / 2, 1, 1), (1.0 + 2 * LAG_S, 1, 1)):
        assert wanted.now(at, target, living, living) <= living


def test_fewer_than_the_least_are_too_few_whatever_is_said() -> None:
    wanted = WantedReplicas(2)
    assert wanted.now(0.0, None, 0, 0) == 2
    assert wanted.now(1.0, None, 2, 3) == 2
    assert wanted.now(1.0 + LAG_S, None, 2, 3) == 3, "of a policy that is silent Serve's own list counts"
    assert wanted.now(2.0 + 2 * LAG_S, 1, 1, 1) == 2
