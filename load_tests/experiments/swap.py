"""Experiment 9: moving a prompt's KV out of and into the device, for each tier, beside computing it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, bullets, by_model, sampled, spread
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
    for model, own in by_model(rows).items():
        words = []
        for tier, name in (("cpu", "the CPU tier"), ("redis", "Redis")):
            wins = [row for row in own if row[f"{tier}_ratio"] < 1]
            all_win = all_win and len(wins) == len(own)
            if not wins:
                words.append(f"{name} never")
                continue
            last = own[-1]
            words.append(
                f"{name} from {wins[0]['prompt_tokens']:,} tokens on, {last[f'{tier}_ratio']:.2f} of recompute "
                f"at {last['prompt_tokens']:,}"
            )
        parts.append(f"{model}: {'; '.join(words)}")
    verdict = (
        "On this machine `load` would do as well as the default `auto` of `kv.load_or_recompute`."
        if all_win
        else "Neither `load` nor `recompute` is right everywhere: `kv.load_or_recompute` stays `auto`."
    )
    return f"{verdict} Swapping in beats recompute from these lengths on:{bullets(parts)}"


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
        Column("cpu_ttft_s", "CPU in, ms", 1e3, 0, spread=True),
        Column("redis_ttft_s", "Redis in, ms", 1e3, 0, spread=True),
        Column("cpu_ratio", "CPU ÷ recompute", 1, 2),
        Column("redis_ratio", "Redis ÷ recompute", 1, 2),
        Column("redis_reused", "from Redis, %", 100, 0),
        Column("out_cpu_s", "CPU out, ms", 1e3, 0),
        Column("out_redis_s", "Redis out, ms", 1e3, 0),
    ),
    points,
    measure,
    plot,
    conclusion,
    shown=sampled("prompt_tokens", 2),
    note=(
        "In: until the first token. Out: from the beginning of the save until the tier has all; what goes to Redis "
        "goes through the CPU tier. Raw bytes; the CSV has device hits and spreads."
    ),
)
