"""Experiment 7: time to the first token and to the last one, with and without reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, bullets, by_model, listed, sampled
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
            f"{model}, {longest:,} tokens: first token from the device {last['device']['ttft_ratio']:.2f}, "
            f"from the CPU tier {last['cpu']['ttft_ratio']:.2f}, from Redis {last['redis']['ttft_ratio']:.2f}; "
            f"last token from the CPU tier {last['cpu']['total_ratio']:.2f}"
        )
        slower += [f"{row['source']} at {row['prompt_tokens']:,} ({model})" for row in own if row["ttft_ratio"] > 1]
    verdict = (
        f"Loading does not pay from {listed(slower)}: `kv.load_or_recompute` is `auto` and not `load`."
        if slower
        else "Loading paid at every length measured here: `kv.load_or_recompute: auto` loads all that is stored."
    )
    return f"{verdict} As a part of the time without reuse, at each model's longest prompt:{bullets(parts)}"


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
    shown=sampled("prompt_tokens", 2),
    note=(
        "Engine, manager, CPU tier and Redis as in a server, without HTTP; everything stored is loaded "
        "(`kv.load_or_recompute: load`)."
    ),
)
