"""Swap against recompute: which arms take turns over which lengths, and what is said of made-up times."""

from __future__ import annotations

from typing import Any

import pytest

from load_tests.experiments.__main__ import EXPERIMENTS
from load_tests.experiments.engines.tiered import CODECS, told_apart
from load_tests.experiments.experiment import Point
from load_tests.experiments.swap import CPU_TIER, FORMS, LINKS, RAW, Swap, least_reused
from tests.load_tests.experiments.fake_engine import SIZES, FakeEngine

SWAP = EXPERIMENTS["swap"]


def points_of(model: str = "10m") -> list[Point]:
    return [point for point in SWAP.points(SIZES) if point.model == model]


def measured() -> tuple[FakeEngine, list[dict[str, Any]]]:
    engine = FakeEngine()
    (point, *_) = points_of()
    return engine, [{"model": "10m", **point.values, **row} for row in SWAP.measure(point, engine)]


def test_the_engine_stores_in_every_form_that_the_experiment_names() -> None:
    assert set(FORMS) <= set(CODECS)
    assert RAW in FORMS


def test_forms_that_bytes_and_names_do_not_tell_apart_have_raw_bytes_between_them() -> None:
    codings = {name: coding for name, (coding, _) in CODECS.items()}
    assert all(told_apart(codings[RAW], other) and told_apart(other, codings[RAW]) for other in codings.values())
    assert told_apart(codings["lossless"], codings["cachegen"])
    for one, other in (("cachegen 1", "cachegen"), ("cachegen", "sparse"), ("sparse", "sparse + cachegen")):
        assert not told_apart(codings[one], codings[other])


def test_bands_of_lengths_follow_each_other_up_to_the_longest() -> None:
    assert [(p.values["shortest"], p.values["longest"]) for p in points_of()] == [(512, 1024), (1024, 2048)]
    assert [(p.values["shortest"], p.values["longest"]) for p in points_of("365m")] == [(512, 768)]


def test_every_form_goes_over_every_link_once_a_round_with_the_rounds_length_and_each_is_first_once() -> None:
    engine, _ = measured()
    arms = len(FORMS) * len(LINKS)
    assert SIZES.repeats == 2
    first, second = engine.rounds[:arms], engine.rounds[arms:]
    assert len(second) == arms
    for one in (first, second):
        assert {(form, rate) for form, rate, _ in one} == {(form, rate) for form in FORMS for rate in LINKS.values()}
        ((tokens,),) = ({length for *_, length in one},)
        assert 512 <= tokens <= 1024
    assert first[0][:2] != second[0][:2]
    assert first[0][2] != second[0][2]


def test_equal_seeds_draw_equal_lengths() -> None:
    (one, _), (other, _) = measured(), measured()
    assert one.rounds == other.rounds


def test_a_row_has_what_was_moved_and_its_ratio_to_recompute_of_the_same_prompt() -> None:
    engine, rows = measured()
    by_arm = {(row["link"], row["form"]): row for row in rows}
    assert set(by_arm) == {(CPU_TIER, RAW), *((link, form) for link in LINKS for form in FORMS)}
    lengths = sorted({tokens for *_, tokens in engine.rounds})
    slow, fast = by_arm["1 Gbit/s", RAW], by_arm["Redis here", "cachegen"]
    assert (slow["prompt_tokens_min"], slow["prompt_tokens_max"]) == tuple(lengths)
    expected = [(0.05 + 1000 * tokens / 1.25e8) / (tokens / 1000) for tokens in lengths]
    assert (slow["in_ratio_max"], slow["in_ratio_min"]) == pytest.approx(tuple(expected))
    assert (slow["times_smaller"], round(fast["times_smaller"])) == (1.0, 7)
    assert by_arm[CPU_TIER, RAW]["in_ttft_s"] == 0.02
    assert slow["out_s"] > by_arm["10 Gbit/s", RAW]["out_s"] > by_arm["Redis here", RAW]["out_s"]


def row(form: str, link: str, in_ratio: float, shortest: int = 512, model: str = "m") -> dict[str, Any]:
    return {
        "model": model, "form": form, "link": link, "shortest": shortest, "in_ratio": in_ratio, "in_ttft_s": in_ratio,
    }  # fmt: skip


def test_a_form_is_worth_it_over_the_links_where_it_is_in_sooner_than_raw_bytes() -> None:
    rows = [
        row("raw", "Redis here", 0.1), row("lossless", "Redis here", 0.2), row("cachegen", "Redis here", 0.3),
        row("raw", "1 Gbit/s", 0.9), row("lossless", "1 Gbit/s", 0.4), row("cachegen", "1 Gbit/s", 0.95),
    ]  # fmt: skip
    said = SWAP.conclusion(rows)
    assert "`load` would do as well" in said
    assert "In the device sooner than raw bytes, by link: 1 Gbit/s lossless." in said
    assert "m, Redis here: raw 0.1, lossless 0.2, cachegen 0.3" in said
    assert "No smaller form" in SWAP.conclusion(rows[:3])
    assert "stays `auto`" in SWAP.conclusion([*rows, row("raw", "1 Gbit/s", 1.2, 1024)])


def test_the_report_shows_the_longest_band_whole_and_raw_bytes_of_the_shortest() -> None:
    rows = [row(form, "1 Gbit/s", 0.5, shortest) for shortest in (512, 1024, 2048) for form in ("raw", "lossless")]
    assert [(one["shortest"], one["form"]) for one in SWAP.shown(rows)] == [
        (512, "raw"),
        (2048, "raw"),
        (2048, "lossless"),
    ]


def test_each_panel_has_every_form_the_cpu_tier_and_recompute() -> None:
    _, rows = measured()
    from matplotlib.figure import Figure  # not for each process that collects tests

    figure = Figure()
    Swap().plot(rows, figure)
    assert len(figure.axes) == 2 * len(LINKS)
    for axes in figure.axes:
        assert set(axes.get_legend_handles_labels()[1]) == {*FORMS, CPU_TIER, "recompute"}


def test_a_load_that_missed_its_deadline_shows_as_less_reuse() -> None:
    found = [{"device": {"reused": 992}, "redis": {"reused": reused}} for reused in (992, 496)]
    assert least_reused(found, "redis") == 0.5
