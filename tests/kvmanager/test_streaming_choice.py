"""Which form of each chunk streaming takes, on links that hold still, drop to a tenth, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.streaming_choice import LOSSLESS, RECOMPUTE, Chunk, PrefixLoad, Stream, choose, leading_chunks_to_load
from load_tests.micro.streaming_links import (
    SIZES,
    Link,
    adaptive,
    always,
    context,
    drops,
    earliest_s,
    fixed,
    over_drops,
    streamed,
)


@settings(deadline=None, max_examples=60)
@given(
    rate=st.floats(500, 50_000),
    recompute_s=st.floats(0.01, 3.0),
    target_s=st.floats(0.1, 10.0),
)
def test_on_a_steady_link_the_target_holds_wherever_it_can_and_no_better_level_would_do(
    rate: float, recompute_s: float, target_s: float
) -> None:
    chunks, link = context(recompute_s), Link([(inf, rate)])
    run = streamed(chunks, link, Stream(chunks, target_s, rate))

    if earliest_s(chunks, link) <= target_s * (1 - 1e-9):
        assert run.end_s <= target_s * (1 + 1e-9)
        for form in (RECOMPUTE, *SIZES):
            arm = fixed(chunks, link, form)
            assert arm.end_s > target_s * (1 - 1e-9) or run.loss <= arm.loss + 1e-9
    else:
        assert run.end_s <= earliest_s(chunks, link) * (1 + 1e-9), "late by no more than need be"


def test_over_links_that_drop_the_choice_holds_what_a_fixed_level_holds_at_a_fraction_of_its_loss() -> None:
    papers, _, level_1, level_2, recomputed = (
        over_drops(arm) for arm in (adaptive(1.0), always(0), always(1), always(2), always(RECOMPUTE))
    )

    assert papers[0] > level_1[0] > recomputed[0]
    assert papers[0] > level_2[0]
    assert papers[1] < 0.4 * level_2[1]


def test_prepared_for_a_drop_the_target_holds_nearly_wherever_any_choice_could_hold_it() -> None:
    possible = sum(earliest_s(context(recompute_s), link) <= target_s for target_s, recompute_s, link in drops())
    prepared, smallest = over_drops(adaptive(0.1)), over_drops(always(3))

    assert prepared[0] >= 0.95 * possible
    assert prepared[0] >= smallest[0]
    assert prepared[1] < 0.6 * smallest[1]


def test_after_a_drop_smaller_forms_follow_and_when_the_link_is_back_better_ones() -> None:
    chunks = context(inf)
    link = Link([(0.5, 3000), (1.3, 300), (inf, 12_000)])
    run = streamed(chunks, link, Stream(chunks, 2.0, 3000))

    before = run.forms[:3]
    assert max(run.forms) == 3 > max(before)
    assert run.forms[-1] < 3
    assert run.end_s <= 2.0


def test_what_is_computed_soon_enough_is_not_loaded_with_loss() -> None:
    chunks = context(0.05)

    assert choose(chunks, 5.0, 3000) == RECOMPUTE
    assert choose(chunks, 5.0, 1e6) == LOSSLESS, "of two forms without loss the faster"


def test_a_link_that_nobody_measured_begins_with_the_middle_level() -> None:
    assert choose(context(inf, {1: 250, 2: 160, 3: 110}), 1.0, None) == 2
    assert choose([Chunk({}, 1.0)], 1.0, None) == RECOMPUTE


def test_a_stream_ends_after_its_last_chunk() -> None:
    stream = Stream(context(0.1)[:2], 1.0, 1000)
    assert [stream.next_form(0.0) is None for _ in range(3)] == [False, False, True]


@settings(deadline=None, max_examples=60)
@given(
    loads=st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 2.0)), min_size=1, max_size=8),
    rate=st.floats(10, 10_000),
    left_s=st.floats(-1.0, 5.0),
)
def test_where_nothing_can_be_loaded_after_what_is_computed_the_cut_is_the_best_of_all_cuts(
    loads: list[tuple[int, float]], rate: float, left_s: float
) -> None:
    chunks = [Chunk({2: size}, recompute_s) for size, recompute_s in loads]

    def took_s(cut: int) -> float:
        return sum(size / rate for size, _ in loads[:cut]) + sum(seconds for _, seconds in loads[cut:])

    cut = leading_chunks_to_load(chunks, left_s, rate)
    if took_s(len(loads)) <= left_s:
        assert cut == len(loads)
    else:
        assert took_s(cut) <= min(took_s(other) for other in range(len(loads) + 1)) + 1e-9


def loaded_s(chunks: Sequence[Chunk], rest_s: float, link: Link, load: PrefixLoad) -> float:
    """When a prompt is computed whose beginning is loaded as `load` says, and whose rest is computed then."""
    now, there = 0.0, 0
    for chunk in chunks:
        arrival = link.end(now, min(chunk.level_bytes.values()))
        if arrival > load.give_up_at:
            now = load.give_up_at
            break
        now, there = arrival, there + 1
        if not load.arrived(now):
            break
    return now + sum(chunk.recompute_s for chunk in chunks[there:]) + rest_s


@settings(deadline=None, max_examples=60)
@given(
    rates=st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(10, 20_000)), min_size=1, max_size=5),
    recompute_s=st.floats(0.01, 0.5),
    rest_s=st.floats(0.0, 0.5),
    slack=st.floats(1.01, 3.0),
)
def test_a_load_never_costs_a_target_that_computing_everything_holds(
    rates: list[tuple[float, float]], recompute_s: float, rest_s: float, slack: float
) -> None:
    chunks = context(recompute_s, {2: 160})
    ends = [sum(length for length, _ in rates[: number + 1]) for number in range(len(rates))]
    link = Link([*((end, rate) for end, (_, rate) in zip(ends, rates, strict=True)), (inf, 1000)])
    target_s = slack * (rest_s + sum(chunk.recompute_s for chunk in chunks))

    assert loaded_s(chunks, rest_s, link, PrefixLoad(chunks, rest_s, 0.0, target_s)) <= target_s * (1 + 1e-9)


def test_a_load_on_a_link_that_fell_is_ended_where_computing_the_rest_is_faster() -> None:
    chunks, rest_s, target_s = context(0.2, {2: 160}), 0.1, 1.0  # computing everything takes 2.4 s
    dropped, steady = Link([(0.2, 4000), (inf, 160)]), Link([(inf, 4000)])
    load = PrefixLoad(chunks, rest_s, 0.0, target_s)

    assert load.give_up_at == inf, "computing everything would not hold the target either"
    assert loaded_s(chunks, rest_s, steady, PrefixLoad(chunks, rest_s, 0.0, target_s)) < target_s
    adapted = loaded_s(chunks, rest_s, dropped, load)
    assert adapted < 0.7 * (fixed(chunks, dropped, 2).end_s + rest_s)
