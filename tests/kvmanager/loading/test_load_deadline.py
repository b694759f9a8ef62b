import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import LinearTime
from kvmanager.loading.prefix_load import (
    DEADLINE_FACTOR,
    MOST_LOAD_S,
    UNKNOWN_BYTES_PER_S,
    load_deadline_s,
    segment_wait_s,
)
from tests.quantities import up_to

MB, GB = 10**6, 10**9
BASE_S = 2.0

sizes = st.dictionaries(st.sampled_from([Tier.CPU, Tier.REDIS]), st.integers(0, 100 * GB))
times = st.dictionaries(
    st.sampled_from([Tier.CPU, Tier.REDIS]), st.builds(LinearTime, up_to(1.0), st.floats(1e3, 1e10))
)


def test_a_hundred_thousand_tokens_of_an_8b_model_have_the_time_that_they_need():
    nbytes = {Tier.CPU: 12.8 * GB}
    fast = {Tier.CPU: LinearTime(0.001, 3 * GB)}  # 4.3 s
    assert load_deadline_s(BASE_S, nbytes, fast) == pytest.approx(BASE_S + DEADLINE_FACTOR * 4.268, rel=1e-3)
    assert load_deadline_s(BASE_S, nbytes, {}) == pytest.approx(BASE_S + DEADLINE_FACTOR * 64)
    assert load_deadline_s(BASE_S, nbytes, {Tier.CPU: LinearTime(0.0, 1e6)}) == MOST_LOAD_S


def test_a_short_load_has_little_more_than_the_base():
    assert load_deadline_s(BASE_S, {Tier.REDIS: MB}, {Tier.REDIS: LinearTime(0.01, GB)}) < BASE_S + 0.05


@given(sizes, times)
def test_what_is_expected_to_end_at_all_is_never_cut_off_before(nbytes, known):
    expected_s = sum(
        known[tier].seconds(size) if tier in known else size / UNKNOWN_BYTES_PER_S for tier, size in nbytes.items()
    )
    deadline_s = load_deadline_s(BASE_S, nbytes, known)
    assert BASE_S <= deadline_s <= MOST_LOAD_S
    assert deadline_s >= min(MOST_LOAD_S, expected_s)


@given(sizes, times, st.integers(1, GB))
def test_more_bytes_have_no_less_time(nbytes, known, more):
    grown = {**nbytes, Tier.CPU: nbytes.get(Tier.CPU, 0) + more}
    assert load_deadline_s(BASE_S, grown, known) >= load_deadline_s(BASE_S, nbytes, known)


def test_a_large_segment_is_waited_for_a_little_longer_than_a_small_one():
    assert segment_wait_s(0.5, 0) == 0.5
    assert segment_wait_s(0.5, 32 * MB) == pytest.approx(0.98)
