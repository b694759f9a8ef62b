"""How many replicas are wanted: the largest figure counts, one goes at a time, what is unknown changes nothing."""

from __future__ import annotations

from math import ceil, inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.scaling.demand import (
    BOUNDS,
    ENOUGH,
    FITS,
    NAMES,
    UNKNOWN,
    Bounds,
    Limits,
    ReplicaLoad,
    decide,
    demands,
    replica_load,
)
from tests.quantities import up_to

LIMITS = Limits(ttft_target_s=2.0, max_num_seqs=32)
ANY = Bounds(1, 1000)
loads = st.builds(
    ReplicaLoad,
    queued_prefill_s=up_to(100.0),
    kv_pressure=up_to(1.0),
    ongoing=up_to(500.0),
    waiting=up_to(500.0),
)
bounds = st.tuples(st.integers(1, 20), st.integers(0, 20)).map(lambda pair: Bounds(pair[0], pair[0] + pair[1]))


def load(queued_prefill_s: float = 0.0, kv_pressure: float = 0.0, ongoing: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(queued_prefill_s, kv_pressure, ongoing, 0.0)


@pytest.mark.parametrize(
    ("each", "wanted", "replicas", "why"),
    [
        ([load(0.9)], 1, 1, ENOUGH),
        ([load(1.1)], 1, 2, "queued_prefill"),
        ([load(7.5)], 1, 8, "queued_prefill"),
        ([load(kv_pressure=0.79)], 1, 1, ENOUGH),
        ([load(kv_pressure=0.95)] * 4, 4, 5, "kv_pressure"),
        ([load(ongoing=25)], 1, 1, ENOUGH),
        ([load(ongoing=26)], 1, 2, "ongoing"),
        ([load(ongoing=52, kv_pressure=0.1, queued_prefill_s=0.1)], 1, 3, "ongoing"),
        ([load()] * 5, 5, 4, FITS),
        ([load(kv_pressure=0.39)] * 2, 2, 1, FITS),
        ([load(kv_pressure=0.41)] * 2, 2, 2, ENOUGH),
        ([load(0.9), load(kv_pressure=0.7), load(ongoing=26)], 3, 2, FITS),
        ([load(0.9), load(kv_pressure=0.7), load(ongoing=60)], 3, 3, ENOUGH),
        ([load()], 1, 1, ENOUGH),
    ],
)
def test_each_figure_asks_for_replicas_and_the_largest_counts(
    each: list[ReplicaLoad], wanted: int, replicas: int, why: str
) -> None:
    decision = decide(each, wanted, ANY, LIMITS)
    assert (decision.replicas, decision.why) == (replicas, why)


@given(st.lists(loads, max_size=12), st.integers(1, 40), bounds)
def test_a_decision_is_within_bounds_and_takes_away_one_at_most(
    each: list[ReplicaLoad], wanted: int, limits: Bounds
) -> None:
    decision = decide(each, wanted, limits, LIMITS)
    assert limits.least <= decision.replicas <= limits.most
    if limits.least <= wanted <= limits.most:
        assert decision.replicas >= wanted - 1


@given(st.lists(loads, min_size=1, max_size=12), st.integers(2, 40))
def test_one_goes_exactly_when_all_three_figures_fit_into_one_less(each: list[ReplicaLoad], wanted: int) -> None:
    fits = all(asked <= wanted - 1 + 1e-6 for asked in demands(each, LIMITS).values())
    assert (decide(each, wanted, ANY, LIMITS).replicas == wanted - 1) == fits


@given(st.lists(loads, min_size=1, max_size=12), st.integers(1, 40))
def test_a_steady_load_comes_to_rest_at_what_it_needs(each: list[ReplicaLoad], wanted: int) -> None:
    needed = max(1, *(ceil(asked - 1e-6) for asked in demands(each, LIMITS).values()))
    for _ in range(2000):
        before, wanted = wanted, decide(each, wanted, ANY, LIMITS).replicas
        if before == wanted:
            break
    assert wanted == min(needed, ANY.most)


@given(st.lists(loads, min_size=1, max_size=12), loads, st.integers(1, 40))
def test_more_load_never_means_fewer_replicas(each: list[ReplicaLoad], more: ReplicaLoad, wanted: int) -> None:
    assert decide([*each, more], wanted, ANY, LIMITS).replicas >= decide(each, wanted, ANY, LIMITS).replicas


@given(st.lists(st.none() | loads, max_size=12).filter(lambda each: None in each or not each), st.integers(1, 40))
def test_what_one_replica_does_not_say_changes_nothing(each: list[ReplicaLoad | None], wanted: int) -> None:
    decision = decide(each, wanted, ANY, LIMITS)
    assert (decision.replicas, decision.why) == (wanted, UNKNOWN)


def test_bounds_that_changed_are_kept_to_whatever_the_figures_say() -> None:
    assert decide([load(50.0)] * 3, 3, Bounds(1, 2), LIMITS).replicas == 2
    assert decide([None], 1, Bounds(2, 4), LIMITS).replicas == 2
    assert decide([load(50.0)] * 2, 2, Bounds(1, 2), LIMITS).why == BOUNDS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [None, -0.1, nan, inf, -inf])
def test_a_figure_that_cannot_be_is_not_known(name: str, value: float | None) -> None:
    stats = load(1.0, 0.5, 3.0).stats()
    assert replica_load(stats) == load(1.0, 0.5, 3.0)
    if value is None:
        del stats[name]
    else:
        stats[name] = value
    assert replica_load(stats) is None


def test_a_pool_is_never_more_than_full() -> None:
    full = replica_load({**load().stats(), "kv_pressure": 1.5})
    assert full is not None
    assert full.kv_pressure == 1.0
