"""What reuse has saved: tokens, hit rates, and seconds of prefill."""

from __future__ import annotations

import pytest

from app.events.savings import WINDOW_S, AllSavings, Savings
from deployments.protocol.wire import KVCacheUsage
from kvmanager.loading.load_rates import PrefillTime

RATE = {"fixed": 0.5, "per_token": 0.001, "per_pair": 1e-6}


def usage(device: int = 0, cpu: int = 0, redis: int = 0, recomputed: int = 0) -> KVCacheUsage:
    return {"device": device, "cpu": cpu, "redis": redis, "recomputed": recomputed, "replica": "0"}


def test_saved_seconds_are_what_the_prompt_would_have_taken_without_and_took_with():
    savings = Savings()
    savings.count(usage(device=100, cpu=300, recomputed=50))
    savings.price(RATE)
    time = PrefillTime(*RATE.values())
    assert savings.seconds == pytest.approx(time.seconds(450) - time.seconds(50, 400))


def test_what_is_priced_is_not_priced_again_and_what_is_not_waits_for_a_rate():
    savings = Savings()
    savings.count(usage(cpu=100, recomputed=10))
    savings.price(None)
    assert savings.report()["saved_prefill_s"] is None
    savings.price(RATE)
    before = savings.seconds
    assert before > 0
    savings.price({**RATE, "per_token": 100.0})
    assert savings.seconds == before
    assert savings.report()["saved_prefill_s"] == round(before, 3)


def test_few_samples_of_the_rate_say_what_is_about_saved_and_the_rate_prices_it_anew():
    savings, early = AllSavings(), {**RATE, "per_token": 0.01}
    savings.count("a", usage(cpu=100, recomputed=10))
    savings.tick(0.0, None)
    assert savings.of("a").report()["saved_prefill_s"] is None
    savings.tick(1.0, None, early)
    savings.tick(2.0, None)  # the manager is away
    report = savings.of("a").report()
    assert (report["saved_prefill_s"], report["saved_is_early"]) == (pytest.approx(1.005), True)
    assert savings.of("a").seconds == 0, "not kept"
    savings.tick(3.0, RATE, early)
    report = savings.of("a").report()
    assert (report["saved_prefill_s"], report["saved_is_early"]) == (pytest.approx(0.105), False)


def test_nothing_reused_saves_nothing_which_is_known():
    savings = Savings()
    savings.count(usage(recomputed=10))
    assert savings.report()["saved_prefill_s"] == 0.0


def test_hit_rates_are_of_all_tokens_ever_and_of_the_last_minute():
    savings = Savings()
    assert savings.hit_rates()["cpu"] == (None, None)
    savings.mark(0.0)
    savings.count(usage(cpu=30, recomputed=70))
    savings.mark(1.0)
    savings.count(usage(cpu=90, recomputed=10))
    assert savings.hit_rates()["cpu"] == (0.6, 0.6)
    savings.mark(WINDOW_S + 0.5)
    assert savings.hit_rates()["cpu"] == (0.6, 0.9)
    savings.mark(10 * WINDOW_S)
    assert savings.hit_rates()["cpu"] == (0.6, None)


def test_each_tenant_has_its_own_and_all_are_in_the_sum():
    savings = AllSavings()
    savings.count("alice", usage(cpu=10, recomputed=1))
    savings.count("bob", usage(redis=5, recomputed=1))
    savings.tick(0.0, RATE)
    assert savings.of("alice").report()["hit_tokens"] == {"device": 0, "cpu": 10, "redis": 0}
    assert savings.of("carol").report()["prompts"] == 0
    assert savings.everybody.report()["tokens"] == {"device": 0, "cpu": 10, "redis": 5, "recomputed": 2}
    assert savings.everybody.seconds == pytest.approx(savings.of("alice").seconds + savings.of("bob").seconds)
