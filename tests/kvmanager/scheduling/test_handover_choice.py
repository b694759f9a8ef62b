"""When a prompt is prefilled on one replica and decoded on another: by what both take, measured."""

from __future__ import annotations

import pytest

from kvmanager.scheduling.rebalancing import LEAST_SAMPLES, PROBE_EVERY, HandoverChoice


def measured(prefill_s_per_token, gap_s, least_tokens=100, samples=8, **options):
    choice = HandoverChoice(least_tokens, **options)
    for number in range(samples):
        choice.prefilled(float(number), 1000 + 50 * number, prefill_s_per_token * (1000 + 50 * number))
        choice.handed_over(float(number), 1000, gap_s)
    return choice


def test_until_it_is_measured_the_setting_decides():
    choice = HandoverChoice(256)
    assert not choice.pays(255, 2000)
    assert choice.pays(256, 2000)
    assert measured(1e-3, 0.6, samples=LEAST_SAMPLES - 1).break_even_tokens(2000) == 100


def test_it_pays_where_the_prefill_takes_longer_than_the_gap():
    choice = measured(1e-3, 0.6)
    assert choice.break_even_tokens(1000) == pytest.approx(600, rel=0.05)
    assert not choice.pays(550, 1000)
    assert choice.pays(650, 1000)


def test_a_slower_way_moves_the_break_even_and_a_faster_one_moves_it_back():
    choice = measured(1e-3, 0.2)
    assert choice.pays(400, 1000)
    for number in range(50):
        choice.handed_over(10.0 + number, 1000, 0.8)
    assert not choice.pays(400, 1000)
    for number in range(50):
        choice.handed_over(100.0 + number, 1000, 0.2)
    assert choice.pays(400, 1000)


def test_never_for_less_than_the_setting():
    choice = measured(1e-2, 0.01)
    assert choice.break_even_tokens(1000) == 100
    assert not any(choice.pays(99, 1000) for _ in range(2 * PROBE_EVERY))


def test_what_does_not_pay_is_tried_now_and_then():
    choice = measured(1e-3, 5.0)
    assert [choice.pays(900, 1000) for _ in range(2 * PROBE_EVERY)].count(True) == 2


def test_nonsense_is_not_learned_from():
    choice = HandoverChoice(100)
    for _ in range(10):
        choice.prefilled(0.0, 0, 1.0)
        choice.prefilled(0.0, 10, 0.0)
        choice.handed_over(0.0, 1000, -1.0)
    assert choice.break_even_tokens(1000) == 100


def test_where_it_is_not_to_be_measured_the_setting_decides_for_ever():
    choice = measured(1e-3, 5.0, measures=False)
    assert choice.break_even_tokens(1000) == 100
    assert choice.pays(100, 1000)
    assert not choice.pays(99, 1000)
