"""The way that hides more is chosen, and nobody else's step stands still for it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvmanager.loading.overlap import ASYNC_S, NEGLIGIBLE_WAIT_S, LoadWay, choose_way, layerwise_ttft
from tests.quantities import up_to

MB = 1_000_000
seconds = up_to(10.0)


def choose(load_s, compute_s, *, first_group_s=None, groups=8, others=0, group_bytes=MB, buffer_bytes=64 * MB):
    return choose_way(
        first_group_s=load_s / groups if first_group_s is None else first_group_s,
        load_s=load_s,
        compute_s=compute_s,
        groups=groups,
        others=others,
        group_bytes=group_bytes,
        buffer_bytes=buffer_bytes,
    )


def pipeline_s(first_group_s, load_s, compute_s, groups):
    """The layers one after the other: each waits for its arrival and for the layer before it."""
    computed = 0.0
    for group in range(groups):
        share = group / (groups - 1) if groups > 1 else 1.0
        computed = max(computed, first_group_s + share * (load_s - first_group_s)) + compute_s / groups
    return computed


@settings(max_examples=60)
@given(first=up_to(1.0), load_s=seconds, compute_s=seconds, groups=st.integers(1, 100))
def test_the_expected_time_is_that_of_the_layers_one_after_the_other(first, load_s, compute_s, groups):
    first_group_s = load_s if groups == 1 else first * load_s
    expected = pipeline_s(first_group_s, load_s, compute_s, groups)
    assert layerwise_ttft(first_group_s, load_s, compute_s, groups) == pytest.approx(expected)


def test_a_load_as_long_as_the_computation_hides_behind_it():
    chosen = choose(load_s=0.4, compute_s=0.4)
    assert chosen.way is LoadWay.LAYERWISE
    assert chosen.ttft_s == pytest.approx(0.45)
    assert chosen.wait_s == pytest.approx(0.05)


def test_others_that_decode_do_not_stand_still_for_a_load():
    chosen = choose(load_s=0.4, compute_s=0.4, others=1)
    assert (chosen.way, chosen.wait_s) == (LoadWay.WHOLE, 0.0)
    assert chosen.ttft_s == pytest.approx(0.8 + ASYNC_S)


def test_others_do_not_mind_a_wait_of_next_to_nothing():
    assert choose(load_s=0.004, compute_s=0.4, others=30).way is LoadWay.LAYERWISE


def test_a_long_load_that_hides_nothing_does_not_hold_up_the_engine():
    assert choose(load_s=1.5, compute_s=0.01).way is LoadWay.WHOLE


def test_a_group_that_the_buffer_does_not_hold_is_not_loaded_layerwise():
    assert choose(load_s=0.4, compute_s=0.4, group_bytes=65 * MB).way is LoadWay.WHOLE


def test_one_group_hides_nothing_but_saves_a_step():
    chosen = choose(load_s=0.001, compute_s=0.05, groups=1)
    assert chosen.way is LoadWay.LAYERWISE
    assert choose(load_s=0.5, compute_s=0.05, groups=1).way is LoadWay.WHOLE


@settings(max_examples=60)
@given(first=up_to(1.0), load_s=seconds, compute_s=seconds, groups=st.integers(1, 100), others=st.integers(0, 3))
def test_what_is_chosen_layerwise_is_expected_to_be_no_slower_and_to_hold_up_nobody(
    first, load_s, compute_s, groups, others
):
    chosen = choose(load_s, compute_s, first_group_s=first * load_s, groups=groups, others=others)
    if chosen.way is LoadWay.LAYERWISE:
        assert chosen.ttft_s <= load_s + compute_s + ASYNC_S
        assert chosen.wait_s >= 0
        assert not others or chosen.wait_s <= NEGLIGIBLE_WAIT_S
