"""The bucket holds its average over any history, and says truly how long to wait."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.gate.rates.limits import TokenBucket
from tests.quantities import up_to

STEPS = st.lists(st.tuples(up_to(30.0), st.integers(0, 80), st.integers(-20, 60)), max_size=50)


@given(per_minute=st.integers(1, 100), steps=STEPS)
def test_no_more_is_taken_than_a_full_bucket_and_what_came_in_the_time(per_minute: int, steps: list) -> None:
    bucket, now, taken, owed = TokenBucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for pause, amount, late in steps:
        now += pause
        if bucket.take(amount, now):
            assert taken + owed + amount <= per_minute + per_minute * now / 60 + 1e-6
            taken += amount
            correction = max(late, -amount)
            bucket.correct(correction, now)
            owed += correction
        assert 0 <= bucket.remaining(now) <= per_minute


@given(per_minute=st.integers(1, 100), steps=STEPS, amount=st.integers(0, 120))
def test_after_the_wait_it_is_there_and_shortly_before_it_is_not(per_minute: int, steps: list, amount: int) -> None:
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    for pause, took, late in steps:
        now += pause
        bucket.take(took, now)
        bucket.correct(late, now)
    wait = bucket.wait_s(amount, now)
    if amount > per_minute:
        assert wait == math.inf
        return
    if wait > 1e-3:
        assert not bucket.take(amount, now + wait - 1e-3)
    assert bucket.take(amount, now + wait + 1e-6)


def test_a_clock_that_steps_back_gives_nothing():
    bucket = TokenBucket(60, 100.0)
    assert bucket.take(60, 100.0)
    assert bucket.remaining(40.0) == 0
    assert bucket.remaining(101.0) == 1


def test_a_debt_is_paid_before_anything_is_taken():
    bucket = TokenBucket(60, 0.0)
    bucket.correct(90, 0.0)
    assert bucket.remaining(29.0) == 0
    assert not bucket.take(1, 30.5)
    assert bucket.take(1, 31.0)
    assert bucket.full_in_s(31.0) == pytest.approx(60.0)
