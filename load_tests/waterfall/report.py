"""What was found as tables, JSON and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load_tests.measuring import plots
from load_tests.measuring.interval import paired_interval, ratio_of_means, starts_interval
from load_tests.measuring.report import table
from load_tests.measuring.spread import percentile
from load_tests.waterfall.measure import CASES, Found

STAGES = (
    "proxy", "parse", "render", "tokenize", "check", "hash", "turn", "route", "handle", "plan", "queue", "load", "step",
    "output", "back", "answer",
)  # fmt: skip
"""`proxy` is the time to the first token that no stage has: Serve's HTTP proxy, the network, the client."""
IN_WORDS = {"tiny": "tiny prompts", "device": "device hits", "cpu": "CPU-tier hits", "redis": "Redis hits"}

Point = tuple[str, int]
"""A case and a concurrency."""


def merged(runs: Sequence[Mapping[Point, Found]]) -> dict[Point, Found]:
    """All alternations of one arm, one after the other."""
    whole: dict[Point, Found] = {}
    for run in runs:
        for point, found in run.items():
            one = whole.setdefault(point, Found())
            one.answers += found.answers
            one.busy_s += found.busy_s
            one.asked += found.asked
            one.elsewhere += found.elsewhere
    return whole


def points_of(found: Mapping[Point, Found]) -> list[Point]:
    """By concurrency, then in the order of `CASES`."""
    return sorted(found, key=lambda point: (point[1], CASES.index(point[0])))


def stage_table(found: Mapping[Point, Found]) -> str:
    """Mean / p95 in milliseconds of each stage, a column for each point."""
    points = [point for point in points_of(found) if found[point].stages_ms()]
    rows = {point: found[point].stages_ms() for point in points}
    head = ["stage, ms", *(f"{IN_WORDS[case]}, {concurrency} at a time" for case, concurrency in points)]
    lines = [
        [f"`{stage}`", *(_mean_and_p95([row.get(stage, 0.0) for row in rows[point]]) for point in points)]
        for stage in STAGES
    ]
    whole = [_mean_and_p95([1e3 * one.first_text_s for one in found[point].answers], bold=True) for point in points]
    return table(head, [*lines, ["**first token**", *whole]])


def _mean_and_p95(values: Sequence[float], bold: bool = False) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    return f"**{mean}** / {percentile(values, 95):.2f}" if bold else f"{mean} / {percentile(values, 95):.2f}"


def peer_table(runs: Mapping[str, Sequence[Mapping[Point, Found]]], base: str) -> str:
    """First token and requests per second of every arm; ``runs`` are its alternations, ratios are of ``base`` to it."""
    arms = {arm: merged(own) for arm, own in runs.items()}
    lines = []
    for point in points_of(arms[base]):
        for arm, found in arms.items():
            if point not in found:
                continue
            ttft = _ttft_ms(found[point])
            own = [
                (_ttft_ms(mine[point]), _ttft_ms(theirs[point]))
                for mine, theirs in zip(runs[base], runs[arm], strict=True)
            ]
            lines.append(
                [
                    f"{IN_WORDS[point[0]]}, {point[1]} at a time",
                    arm,
                    f"{statistics.median(ttft):.1f} / {_mean_and_p95(ttft)}",
                    "1" if arm == base else ttft_ratio(own),
                    f"{found[point].requests_per_s:.1f}",
                    "1" if arm == base else f"{arms[base][point].requests_per_s / found[point].requests_per_s:.2f}",
                ]
            )
    head = ("requests", "arm", "first token, ms: median / mean / p95", f"{base} ÷ arm (95 %)", "requests/s",
            f"{base} ÷ arm")  # fmt: skip
    return table(head, lines)


def _ttft_ms(found: Found) -> list[float]:
    return [1e3 * one.first_text_s for one in found.answers]


def ttft_ratio(starts: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str:
    """Of the means, an alternation's own and the other's times after each other, with an interval over alternations.

    One alternation has an interval over pairs of the same prompt, if none was left out, and says that it had one start.
    """
    ratios = [statistics.fmean(mine) / statistics.fmean(theirs) for mine, theirs in starts]
    ratio = f"{statistics.geometric_mean(ratios):.2f}"
    if len(starts) > 1:
        return f"{ratio} ({starts_interval(ratios)})"
    ((mine, theirs),) = starts
    if len(mine) != len(theirs):
        return f"{ratio} (one start)"
    return f"{ratio} ({paired_interval(mine, theirs, ratio_of_means)}; one start)"


def as_json(arms: Mapping[str, Mapping[Point, Found]], machine: str) -> dict[str, Any]:
    """Every answer of every arm: seconds, and crosskv's stages."""
    return {
        "machine": machine,
        "arms": {
            arm: [
                {
                    "case": case,
                    "concurrency": concurrency,
                    "requests_per_s": found[case, concurrency].requests_per_s,
                    "elsewhere": found[case, concurrency].elsewhere,
                    "ttft_s": [one.first_text_s for one in found[case, concurrency].answers],
                    "total_s": [one.seconds for one in found[case, concurrency].answers],
                    "stages_ms": found[case, concurrency].stages_ms(),
                }
                for case, concurrency in points_of(found)
            ]
            for arm, found in arms.items()
        },
    }


def draw(found: Mapping[Point, Found], path: Path | str) -> None:
    """A bar for each case, stage by stage from left to right, a panel for each concurrency. Raises OSError."""
    from matplotlib import colormaps

    points = [point for point in points_of(found) if found[point].stages_ms()]
    concurrencies = list(dict.fromkeys(concurrency for _, concurrency in points))
    figure = plots.new_figure(11.0, 1.2 + 2.2 * len(concurrencies))
    panels = figure.subplots(len(concurrencies), 1, squeeze=False)[:, 0]
    colours = [colormaps["tab20"](number % 20) for number in range(len(STAGES))]
    for panel, concurrency in zip(panels, concurrencies, strict=True):
        own = [point for point in points if point[1] == concurrency][::-1]
        left = [0.0] * len(own)
        for stage, colour in zip(STAGES, colours, strict=True):
            widths = [statistics.fmean(row.get(stage, 0.0) for row in found[point].stages_ms()) for point in own]
            panel.barh(range(len(own)), widths, left=left, label=stage, color=colour, height=0.7)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        panel.set_yticks(range(len(own)), [IN_WORDS[case] for case, _ in own])
        panel.set(title=f"{concurrency} at a time", xlabel="ms, mean")
        panel.grid(axis="x", alpha=0.3)
    panels[0].legend(ncol=8, fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.15))
    figure.suptitle("Where the time to the first token goes")
    plots.save(figure, path, dpi=110)
