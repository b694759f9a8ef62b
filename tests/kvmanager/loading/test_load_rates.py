import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import ALL_REPLICAS, ENOUGH, LOAD_HALF_LIFE_SAMPLES, ClusterRates, LoadRates, pairs
from tests.quantities import around

STARTING = {Tier.DEVICE: 1.0, Tier.CPU: 0.75, Tier.REDIS: 0.5}
TOKEN_BYTES = 1000


@pytest.fixture
def rates():
    return LoadRates(STARTING)


def feed(rates, tier, latency_s, bytes_per_s, samples=50, prefill_tokens_per_s=2000.0):
    rng = random.Random(1)
    for _ in range(samples):
        tokens = rng.randint(100, 4000)
        nbytes = tokens * TOKEN_BYTES
        rates.loaded(tier, tokens, nbytes, latency_s + nbytes / bytes_per_s)
        rates.prefilled(tokens, tokens / prefill_tokens_per_s)


def test_a_credit_is_one_minus_load_time_over_recompute_time(rates):
    feed(rates, Tier.CPU, latency_s=0.0, bytes_per_s=20e6)  # 50 us a token, of 500 us to compute it
    assert rates.credits() == {Tier.DEVICE: 1.0, Tier.CPU: pytest.approx(0.9), Tier.REDIS: 0.5}
    assert rates.prefill().seconds(2000) == pytest.approx(1.0)


def test_latency_and_rate_are_told_apart(rates):
    feed(rates, Tier.REDIS, latency_s=0.03, bytes_per_s=5e6)
    assert rates.tier_time(Tier.REDIS) == pytest.approx((0.03, 5e6))


def test_few_samples_leave_the_starting_value(rates):
    feed(rates, Tier.CPU, 0.0, 20e6, samples=ENOUGH - 1)
    assert rates.credits() == STARTING
    assert rates.tier_time(Tier.CPU) is None
    feed(rates, Tier.CPU, 0.0, 20e6, samples=1)
    assert rates.credits()[Tier.CPU] == pytest.approx(0.9)


def test_one_sample_says_early_what_computing_takes_and_nothing_that_choices_rest_on(rates):
    assert rates.early_prefill() is None
    rates.prefilled(100, 0.5)
    assert rates.prefill() is None
    assert rates.early_prefill().seconds(200) == pytest.approx(1.0)


def test_loads_without_a_prefill_rate_leave_the_starting_value(rates):
    for _ in range(50):
        rates.loaded(Tier.CPU, 100, 100_000, 0.001)
    assert rates.credits() == STARTING


def test_a_tier_slower_than_computing_has_no_credit(rates):
    feed(rates, Tier.REDIS, latency_s=0.0, bytes_per_s=1e6)
    assert rates.credits()[Tier.REDIS] == 0.0


def test_a_change_shows_after_a_few_half_lives(rates):
    feed(rates, Tier.CPU, 0.0, 20e6, samples=1000)
    feed(rates, Tier.CPU, 0.0, 4e6, samples=int(4 * LOAD_HALF_LIFE_SAMPLES))
    assert rates.credits()[Tier.CPU] == pytest.approx(0.5, abs=0.02)


def test_loads_of_one_size_are_put_down_to_the_rate(rates):
    for _ in range(20):
        rates.loaded(Tier.CPU, 256, 256_000, 0.1)
    assert rates.tier_time(Tier.CPU) == pytest.approx((0.0, 2_560_000))


def test_small_loads_faster_than_the_rate_explains_make_no_latency_below_zero(rates):
    for tokens, seconds in [(100, 0.001), (1000, 0.1)] * 20:
        rates.loaded(Tier.CPU, tokens, tokens * TOKEN_BYTES, seconds)
    latency_s, bytes_per_s = rates.tier_time(Tier.CPU)
    assert latency_s == 0.0
    assert 9e6 < bytes_per_s < 100e6


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-5, 5000), st.integers(-5, 10**7), around(-1.0, 100.0)), max_size=60))
def test_no_samples_lead_outside_of_zero_to_one(samples):
    rates = LoadRates(STARTING)
    for tokens, nbytes, seconds in samples:
        rates.loaded(Tier.CPU, tokens, nbytes, seconds)
        rates.loaded(Tier.REDIS, tokens, nbytes, seconds)
        rates.prefilled(tokens, seconds)
    assert all(0.0 <= credit <= 1.0 for credit in rates.credits().values())
    for tier in (Tier.CPU, Tier.REDIS):
        line = rates.tier_time(tier)
        assert line is None or (line.latency_s >= 0 and line.per_s > 0)


def test_nonsense_is_ignored(rates):
    for _ in range(20):
        rates.prefilled(100, float("nan"))
        rates.prefilled(100, float("inf"))
        rates.loaded(Tier.CPU, 100, 1000, float("nan"))
        LoadRates({}).loaded(Tier.CPU, 100, 1000, 1.0)
    assert rates.credits() == STARTING
    assert rates.prefill() is None


def test_attention_to_the_context_is_told_apart(rates):
    rng = random.Random(4)
    for _ in range(40):
        tokens, context = rng.randint(32, 2000), rng.choice([0, 1000, 4000])
        rates.prefilled(tokens, 0.003 + 1e-4 * tokens + 2e-8 * pairs(tokens, context), context)
    assert rates.prefill() == pytest.approx((0.003, 1e-4, 2e-8))
    assert rates.prefill().seconds(100, 4000) == pytest.approx(0.003 + 0.01 + 2e-8 * 405_000)


def test_bytes_that_were_ahead_of_a_load_do_not_make_the_tier_slow(rates):
    for number in range(20):
        nbytes, ahead = 1_000_000 * (1 + number % 4), 1_000_000 * (number % 3)
        rates.loaded(Tier.REDIS, 256, nbytes, 0.01 + (nbytes + ahead) / 1e8, ahead, now=number)
    assert rates.tier_time(Tier.REDIS) == pytest.approx((0.01, 1e8))


def test_a_load_that_was_given_up_is_enough_to_know_that_a_tier_is_slow(rates):
    rates.given_up(Tier.REDIS, 1_000_000, 2.0)
    assert rates.tier_time(Tier.REDIS).seconds(1_000_000) == pytest.approx(4.0)


def test_each_load_that_is_given_up_doubles_what_is_expected(rates):
    expected = []
    for now in range(4):
        rates.given_up(Tier.REDIS, 1_000_000, 0.5, now=now)
        expected.append(rates.tier_time(Tier.REDIS).seconds(1_000_000))
    assert expected == pytest.approx([1.0, 2.0, 4.0, 8.0])


def test_a_tier_that_never_brought_anything_has_no_credit(rates):
    feed(rates, Tier.CPU, 0.0, 20e6)
    rates.given_up(Tier.REDIS, 1_000_000, 2.0)
    assert rates.credits()[Tier.REDIS] == 0.0


def samples(load_s, count=ENOUGH):
    return [("prefill", 1000, 0.5), ("load", "cpu", 1000, 10**6, load_s)] * count


def test_each_replica_has_credits_of_its_own_and_new_ones_those_of_all():
    rates = ClusterRates(STARTING)
    assert rates.credits() == {}
    for _ in range(ENOUGH):
        rates.report("a", samples(0.1, count=1))
        rates.report("b", samples(0.3, count=1))
    rates.report("new", samples(0.15, count=1))
    credits = rates.credits()
    assert set(credits) == {ALL_REPLICAS, "a", "b"}
    assert credits["a"] == {"cpu": pytest.approx(0.8)}
    assert credits["b"] == {"cpu": pytest.approx(0.4)}
    assert 0.5 < credits[ALL_REPLICAS]["cpu"] < 0.7
    rates.forget_replica("a")
    assert set(rates.credits()) == {ALL_REPLICAS, "b"}


def test_a_replica_that_was_lucky_has_the_credit_of_all():
    rates = ClusterRates(STARTING)
    rates.report("a", samples(0.01))
    rates.report("b", samples(0.04))
    credits = rates.credits()
    assert credits["a"] == credits["b"] == credits[ALL_REPLICAS]


def test_a_replica_that_is_shunned_is_redeemed_by_time():
    rates = ClusterRates(STARTING)
    rates.report("b", samples(0.5))
    rates.report("a", samples(0.1) * 4)
    common = rates.credits()[ALL_REPLICAS]["cpu"]
    shunned = [rates.credits(now)["b"]["cpu"] for now in (0.0, 30.0, 60.0, 300.0)]
    assert shunned == [pytest.approx(0.0), pytest.approx(common / 2), pytest.approx(common * 3 / 4), common]
    assert common > 0.5


def test_samples_of_unknown_tiers_are_ignored():
    rates = ClusterRates(STARTING)
    rates.report("a", [("prefill", 1000, 0.5), ("load", "tape", 1000, 10**6, 0.1)] * ENOUGH)
    assert rates.credits() == {}
