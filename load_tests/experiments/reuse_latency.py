"""Experiment 7: time to the first token and to the last one, with and without reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, by_model, listed
from load_tests.experiments.rounds import SOURCES, rounds, times_by_source
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "reuse_latency"


def points(sizes: Sizes) -> list[Point]:
    """A prompt length of a model each."""
    answer = 16 if sizes.quick else 64
    return [
        Point(
            NAME,
            model,
            sizes.tiered(model),
            {"prompt_tokens": tokens, "answer_tokens": answer, "repeats": sizes.repeats},
        )
        for model in sizes.models
        for tokens in sizes.tiered_prompts(model)
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """A row for each place that the prompt's KV comes from; in each round all of them, one after the other."""
    found = rounds(point, engine)
    first, last = times_by_source(found, "ttft_s"), times_by_source(found, "seconds")
    rows = []
    for source in SOURCES:
        row: Row = {"source": source}
        for end in ("", "_min", "_max"):
            row[f"ttft_s{end}"] = first[f"{source}_ttft_s{end}"]
            row[f"ttft_ratio{end}"] = first[f"{source}_ratio{end}"]
            row[f"total_s{end}"] = last[f"{source}_seconds{end}"]
            row[f"total_ratio{end}"] = last[f"{source}_ratio{end}"]
        rows.append(row)
    return rows


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """A column of plots for each model."""
    models = by_model(rows)
    grid = figure.subplots(2, len(models), squeeze=False, sharex="col")
    for column, (model, own) in enumerate(models.items()):
        charts.lines(grid[0][column], own, "prompt_tokens", "ttft_s", by="source")
        charts.finish(grid[0][column], "", "TTFT, s", ylog=True, title=model)
        charts.lines(grid[1][column], own, "prompt_tokens", "total_s", by="source")
        charts.finish(grid[1][column], "prompt, tokens", "last token, s", ylog=True)


def conclusion(rows: Sequence[Row]) -> str:
    """Whether what is stored should be loaded."""
    parts, slower = [], []
    for model, own in by_model(rows).items():
        longest = max(row["prompt_tokens"] for row in own)
        last = {row["source"]: row for row in own if row["prompt_tokens"] == longest}
        parts.append(
            f"{last['device']['ttft_ratio']:.2f}, {last['cpu']['ttft_ratio']:.2f} and "
            f"{last['redis']['ttft_ratio']:.2f} "
            f"({model}, {longest:,} tokens; {last['cpu']['total_ratio']:.2f} of the time to the last token from the "
            "CPU tier)"
        )
        slower += [f"{row['source']} at {row['prompt_tokens']:,} ({model})" for row in own if row["ttft_ratio"] > 1]
    verdict = (
        f"it does not pay from {listed(slower)}, which is why `kv.load_or_recompute` is `auto` and not `load`"
        if slower
        else "it paid at every length measured here, and `kv.load_or_recompute: auto` loads it all"
    )
    return (
        "From the device, the CPU tier and Redis the first token takes this part of the time without reuse: "
        f"{listed(parts)}; "
        f"{verdict}."
    )


EXPERIMENT = Experiment(
    NAME,
    "Latency with and without reuse",
    "How long until the first and the last token, with nothing to reuse and with KV on the device, in a CPU tier, in "
    "Redis?",
    "kv.load_or_recompute",
    (
        Column("model", "model"),
        Column("prompt_tokens", "prompt", digits=0),
        Column("source", "KV from"),
        Column("ttft_s", "TTFT, ms", 1e3, 0, spread=True),
        Column("ttft_ratio", "÷ without", 1, 2, spread=True),
        Column("total_s", "last token, ms", 1e3, 0, spread=True),
        Column("total_ratio", "÷ without", 1, 2, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    note=(
        "Engine, manager, CPU tier and Redis as in a server, without HTTP; everything stored is loaded "
        "(`kv.load_or_recompute: load`)."
    ),
)
