"""Experiment 9: moving a prompt's KV out of and into the device, for each tier, beside computing it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, by_model, listed, spread
from load_tests.experiments.rounds import SOURCES, least_reused, rounds, times_by_source
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "swap"


def points(sizes: Sizes) -> list[Point]:
    """A prompt length of a model each; the first token is all that is waited for."""
    return [
        Point(NAME, model, sizes.tiered(model), {"prompt_tokens": tokens, "answer_tokens": 1, "repeats": sizes.repeats})
        for model in sizes.models
        for tokens in sizes.tiered_prompts(model)
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """In and out are of the same prompts; `none` is recompute."""
    found = rounds(point, engine)
    row = times_by_source(found, "ttft_s", SOURCES)
    for tier in ("cpu", "redis"):
        row |= spread(f"out_{tier}_s", [one["out"][tier] for one in found])
        row[f"{tier}_reused"] = least_reused(found, tier)
    return [row | {"kv_bytes": found[-1]["bytes"]["cpu"]}]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """A plot for each model."""
    models = by_model(rows)
    (grid,) = figure.subplots(1, len(models), squeeze=False)
    titles = {
        "none_ttft_s": "recompute", "device_ttft_s": "device hit", "cpu_ttft_s": "in, CPU tier",
        "redis_ttft_s": "in, Redis", "out_cpu_s": "out, CPU tier", "out_redis_s": "out, Redis",
    }  # fmt: skip
    for axes, (model, own) in zip(grid, models.items(), strict=True):
        for key, title in titles.items():
            arms = [
                {"prompt_tokens": row["prompt_tokens"], "arm": title}
                | {f"s{end}": row[f"{key}{end}"] for end in ("", "_min", "_max")}
                for row in own
            ]
            charts.lines(axes, arms, "prompt_tokens", "s", by="arm")
        charts.finish(axes, "prompt, tokens", "s", ylog=True, title=model)


def conclusion(rows: Sequence[Row]) -> str:
    """Which tier beats computing, from which length on."""
    parts, all_win = [], True
    for tier, name in (("cpu", "the CPU tier"), ("redis", "Redis")):
        for model, own in by_model(rows).items():
            wins = [row for row in own if row[f"{tier}_ratio"] < 1]
            all_win = all_win and len(wins) == len(own)
            if not wins:
                parts.append(f"{name} never ({model})")
                continue
            last = own[-1]
            parts.append(
                f"{name} from {wins[0]['prompt_tokens']:,} tokens on, {last[f'{tier}_ratio']:.2f} of recompute at "
                f"{last['prompt_tokens']:,} ({model})"
            )
    verdict = (
        "so `load` would do as well as the default `auto` of `kv.load_or_recompute` on this machine"
        if all_win
        else "so neither `load` nor `recompute` is right everywhere, and `kv.load_or_recompute` stays `auto`"
    )
    return f"Swapping in beats recompute: {listed(parts)}; {verdict}."


EXPERIMENT = Experiment(
    NAME,
    "Swap against recompute",
    "How long do swap-in and swap-out take for each tier, beside recompute?",
    "kv.load_or_recompute",
    (
        Column("model", "model"),
        Column("prompt_tokens", "prompt", digits=0),
        Column("kv_bytes", "KV, MiB", 2**-20, 1),
        Column("none_ttft_s", "recompute, ms", 1e3, 0, spread=True),
        Column("device_ttft_s", "device hit, ms", 1e3, 0),
        Column("cpu_ttft_s", "in from CPU tier, ms", 1e3, 0, spread=True),
        Column("redis_ttft_s", "in from Redis, ms", 1e3, 0, spread=True),
        Column("cpu_ratio", "CPU tier ÷ recompute", 1, 2, spread=True),
        Column("redis_ratio", "Redis ÷ recompute", 1, 2, spread=True),
        Column("redis_reused", "came from Redis, %", 100, 0),
        Column("out_cpu_s", "out to CPU tier, ms", 1e3, 0, spread=True),
        Column("out_redis_s", "out to Redis, ms", 1e3, 0, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    note=(
        "In: until the first token. Out: from the beginning of the save until the tier has all; what goes to Redis "
        "goes through the CPU tier. Raw bytes."
    ),
)
