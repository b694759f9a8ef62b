"""Experiment 7: what reuse brings from each tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments.columns import MODEL, PROMPT, Column, Row, ms
from load_tests.experiments.experiment import Experiment, Point, by_model, spread
from load_tests.experiments.sizes import Sizes
from load_tests.harness.engine_process import EngineProcess
from load_tests.measuring import plots
from load_tests.measuring.report import bullets, listed
from load_tests.measuring.spread import ratios

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCES = ("none", "device", "cpu", "redis")
"""Where a prompt's KV comes from; `none`: it is computed."""


class ReuseLatency(Experiment):
    """Time to the first token and to the last one, with and without reuse."""

    name = "reuse_latency"
    title = "Latency with and without reuse"
    question = (
        "How long until the first and the last token, with nothing to reuse and with KV on the device, in a CPU tier, "
        "in Redis?"
    )
    setting = "kv.load_or_recompute"
    tiered = True
    columns = (
        MODEL,
        PROMPT,
        Column("source", "KV from"),
        ms("ttft_s", "TTFT"),
        Column("ttft_ratio", "÷ without", 1, 2),
        ms("total_s", "last token"),
        Column("total_ratio", "÷ without", 1, 2),
    )
    sample = ("prompt_tokens", 2)
    note = (
        "Engine, manager, CPU tier and Redis as in a server, without HTTP; everything stored is loaded "
        "(`kv.load_or_recompute: load`)."
    )

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A prompt length each."""
        answer = {"answer_tokens": 16 if sizes.quick else 64}
        return [{"prompt_tokens": tokens, **answer} for tokens in sizes.tiered_prompts(model)]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """A row for each place that the prompt's KV comes from; in each round all of them, one after the other."""
        values = point.values
        sizes = {"tokens": values["prompt_tokens"], "max_tokens": values["answer_tokens"]}
        found = [engine.call("round", **sizes) for _ in range(values["repeats"])]
        rows = []
        for source in SOURCES:
            row: Row = {"source": source}
            for name, time in (("ttft", "ttft_s"), ("total", "seconds")):
                seconds, computed = ([one[where][time] for one in found] for where in (source, "none"))
                row |= spread(f"{name}_s", seconds) | spread(f"{name}_ratio", ratios(seconds, computed))
            rows.append(row)
        return rows

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """A column of plots for each model."""
        models = by_model(rows)
        grid = figure.subplots(2, len(models), squeeze=False, sharex="col")
        for column, (model, own) in enumerate(models.items()):
            plots.lines(grid[0][column], own, "prompt_tokens", "ttft_s", by="source")
            plots.finish(grid[0][column], "", "TTFT, s", ylog=True, title=model)
            plots.lines(grid[1][column], own, "prompt_tokens", "total_s", by="source")
            plots.finish(grid[1][column], "prompt, tokens", "last token, s", ylog=True)

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Whether what is stored should be loaded."""
        parts, slower = [], []
        for model, own in by_model(rows).items():
            longest = max(row["prompt_tokens"] for row in own)
            last = {row["source"]: row for row in own if row["prompt_tokens"] == longest}
            device, cpu, redis = (last[source]["ttft_ratio"] for source in SOURCES[1:])
            parts.append(
                f"{model}, {longest:,} tokens: first token from the device {device:.2f}, from the CPU tier {cpu:.2f}, "
                f"from Redis {redis:.2f}; last token from the CPU tier {last['cpu']['total_ratio']:.2f}"
            )
            slower += [f"{row['source']} at {row['prompt_tokens']:,} ({model})" for row in own if row["ttft_ratio"] > 1]
        verdict = (
            f"Loading does not pay from {listed(slower)}: `kv.load_or_recompute` is `auto` and not `load`."
            if slower
            else "Loading paid at every length measured here: `kv.load_or_recompute: auto` loads all that is stored."
        )
        return f"{verdict} As a part of the time without reuse, at each model's longest prompt:{bullets(parts)}"
