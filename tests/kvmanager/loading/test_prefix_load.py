"""A load under a target, on links that hold still, drop to a tenth, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.loading.prefix_load import LoadedSegment, PrefixLoad, segments_to_wait_for
from tests.quantities import around, up_to

SEGMENTS = 12
NBYTES = 160


def prefix(recompute_s: float) -> list[LoadedSegment]:
    """Later segments take longer to compute, for they attend to more."""
    return [LoadedSegment(NBYTES, recompute_s * (0.7 + 0.6 * number / SEGMENTS)) for number in range(SEGMENTS)]


class Link:
    """Bytes per second over time: `(until_s, rate)`, the last until infinity."""

    def __init__(self, *rates: tuple[float, float]) -> None:
        self.rates = rates

    def end(self, start_s: float, nbytes: float) -> float:
        """When a transfer that starts at `start_s` ends."""
        for until, rate in self.rates:
            if start_s >= until:
                continue
            if (until - start_s) * rate >= nbytes:
                return start_s + nbytes / rate
            nbytes -= (until - start_s) * rate
            start_s = until
        raise AssertionError("the link ends")


@settings(max_examples=60)
@given(
    loads=st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 2.0)), min_size=1, max_size=8),
    rate=st.floats(10, 10_000),
    left_s=around(-1.0, 5.0),
)
def test_where_nothing_can_be_loaded_after_what_is_computed_the_cut_is_the_best_of_all_cuts(
    loads: list[tuple[int, float]], rate: float, left_s: float
) -> None:
    segments = [LoadedSegment(size, recompute_s) for size, recompute_s in loads]

    def took_s(cut: int) -> float:
        return sum(size / rate for size, _ in loads[:cut]) + sum(seconds for _, seconds in loads[cut:])

    cut = segments_to_wait_for(segments, left_s, rate)
    if took_s(len(loads)) <= left_s:
        assert cut == len(loads)
    else:
        assert took_s(cut) <= min(took_s(other) for other in range(len(loads) + 1)) + 1e-9


def loaded_s(segments: Sequence[LoadedSegment], rest_s: float, link: Link, load: PrefixLoad) -> float:
    """When a prompt is computed whose beginning is loaded as `load` says, and whose rest is computed then."""
    now, there = 0.0, 0
    for segment in segments:
        arrival = link.end(now, segment.nbytes)
        if arrival > load.give_up_at:
            now = load.give_up_at
            break
        now, there = arrival, there + 1
        if not load.arrived(now):
            break
    return now + sum(segment.recompute_s for segment in segments[there:]) + rest_s


@settings(max_examples=60)
@given(
    rates=st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(10, 20_000)), min_size=1, max_size=5),
    recompute_s=st.floats(0.01, 0.5),
    rest_s=up_to(0.5),
    slack=st.floats(1.01, 3.0),
)
def test_a_load_never_costs_a_target_that_computing_everything_holds(
    rates: list[tuple[float, float]], recompute_s: float, rest_s: float, slack: float
) -> None:
    segments = prefix(recompute_s)
    ends = [sum(length for length, _ in rates[: number + 1]) for number in range(len(rates))]
    link = Link(*((end, rate) for end, (_, rate) in zip(ends, rates, strict=True)), (inf, 1000))
    target_s = slack * (rest_s + sum(segment.recompute_s for segment in segments))

    assert loaded_s(segments, rest_s, link, PrefixLoad(segments, rest_s, 0.0, target_s)) <= target_s * (1 + 1e-9)


def test_a_load_on_a_link_that_fell_is_ended_where_computing_the_rest_is_faster() -> None:
    segments, rest_s, target_s = prefix(0.2), 0.1, 1.0  # computing everything takes 2.4 s
    dropped, steady = Link((0.2, 4000), (inf, 160)), Link((inf, 4000))
    load = PrefixLoad(segments, rest_s, 0.0, target_s)

    assert load.give_up_at == inf, "computing everything would not hold the target either"
    assert loaded_s(segments, rest_s, steady, PrefixLoad(segments, rest_s, 0.0, target_s)) < target_s
    adapted = loaded_s(segments, rest_s, dropped, load)
    end_s = 0.0
    for segment in segments:
        end_s = dropped.end(end_s, segment.nbytes)
    assert adapted < 0.7 * (end_s + rest_s)
