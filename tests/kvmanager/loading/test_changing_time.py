import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvmanager.loading.changing_time import ChangingTime
from tests.quantities import up_to


def fed(samples, amounts=1):
    time = ChangingTime(amounts, half_life_samples=8, half_life_s=30)
    for now, (values, seconds) in enumerate(samples):
        time.add(values, seconds, now)
    return time


def line(latency_s, per_s, sizes):
    return [((size,), latency_s + size / per_s) for size in sizes]


SIZES = [size * 1e6 for size in random.Random(1).choices(range(1, 17), k=40)]


def test_a_constant_and_a_rate_are_told_apart():
    assert fed(line(0.03, 5e6, SIZES)).coefficients == pytest.approx((0.03, 2e-7))


def test_three_terms_are_told_apart():
    rng = random.Random(2)
    samples = []
    for _ in range(60):
        tokens, pairs = rng.randint(30, 4000), rng.randint(1, 10**7)
        samples.append(((tokens, pairs), 0.004 + 2e-4 * tokens + 3e-8 * pairs))
    assert fed(samples, amounts=2).coefficients == pytest.approx((0.004, 2e-4, 3e-8))


def test_samples_of_one_size_are_put_down_to_the_rate():
    assert fed(line(0.5, 1e6, [3e6] * 10)).coefficients == pytest.approx((0.0, 3.5 / 3e6))


def test_noise_earns_no_term_of_its_own():
    rng = random.Random(3)
    samples = [((size * 1e6,), size * 0.01 * rng.uniform(0.8, 1.25)) for size in [7, 8, 9] * 20]
    assert fed(samples).seconds(160e6) == pytest.approx(1.6, rel=0.15)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_after_a_change_by_ten_the_next_estimate_is_near_the_truth(factor):
    time = fed(line(0.005, 1e8, SIZES))
    ((amounts, seconds),) = line(0.005 * factor, 1e8 / factor, [8e6])
    time.add(amounts, seconds, 41)
    assert time.seconds(8e6) == pytest.approx(seconds, rel=0.2)
    assert time.seconds(16e6) == pytest.approx(0.005 * factor + 16e6 / 1e8 * factor, rel=0.2)


def test_a_change_by_three_is_seen_in_two_samples_and_one_by_two_in_four():
    for factor, samples in ((3.0, 2), (2.0, 4)):
        time = fed(line(0.0, 1e8, SIZES))
        for number in range(samples):
            time.add((8e6,), factor * 0.08, 41 + number)
        assert time.seconds(8e6) == pytest.approx(factor * 0.08, rel=0.15)


def test_one_sample_that_is_four_times_too_long_moves_the_estimate_little():
    time = fed(line(0.0, 1e8, SIZES))
    time.add((8e6,), 4 * 0.08, 41)
    assert time.seconds(8e6) < 1.2 * 0.08
    for number in range(8):
        time.add((8e6,), 0.08, 42 + number)
    assert time.seconds(8e6) == pytest.approx(0.08, rel=0.2)


def test_a_quiet_night_leaves_the_estimate_and_the_next_samples_count_most():
    time = fed(line(0.005, 1e8, SIZES))
    before = time.coefficients
    assert time.seconds(16e6) == pytest.approx(0.165)
    time.add((8e6,), 2 * 0.085, 40_000)
    assert time.coefficients != before
    assert time.seconds(8e6) == pytest.approx(1.5 * 0.085, rel=0.2)
    assert time.seconds(1e3) < 0.02, "the shape of before is kept"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**12), st.floats(1e-6, 1e4), up_to(1e4)), max_size=30)
)
def test_no_samples_lead_below_zero(samples):
    time = ChangingTime(2, 8, 30)
    now = 0.0
    for tokens, pairs, seconds, passed_s in samples:
        now += passed_s
        time.add((tokens, pairs), seconds, now)
        assert min(time.coefficients) >= 0
        assert all(value < float("inf") for value in time.coefficients)
