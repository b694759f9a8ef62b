"""Experiment 3: prefill's share with the prompt fixed and the answer growing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, by_model, listed, sampled, spread
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "output_share"
PARTS = (160, 64, 32, 16, 8, 4, 2)
"""Answers as parts of the prompt, from 16K : 0.1K to 16K : 8K."""


def points(sizes: Sizes) -> list[Point]:
    """A model each: the times of the longest answer's tokens hold those of all shorter ones."""
    return [
        Point(
            NAME,
            model,
            sizes.plain(model),
            {"prompt_tokens": max(128, sizes.longest[model] // 4), "repeats": sizes.repeats},
        )
        for model in sizes.models
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """One request at a time."""
    prompt = point.values["prompt_tokens"]
    answers = sorted({max(1, prompt // part) for part in PARTS})
    runs = [
        engine.call("run", prompts=[prompt], max_tokens=answers[-1])["requests"][0]
        for _ in range(point.values["repeats"])
    ]
    return [
        {
            "answer_tokens": answer,
            **spread("total_s", [times[answer - 1] for times in runs]),
            **spread("share", [times[0] / times[answer - 1] for times in runs]),
        }
        for answer in answers
    ]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """The share over the answer's length as a part of the prompt's."""
    axes = figure.subplots()
    parts = [{**row, "part": row["answer_tokens"] / row["prompt_tokens"]} for row in rows]
    labelled = [{**row, "model": f"{row['model']}, prompt {row['prompt_tokens']:,}"} for row in parts]
    charts.lines(axes, labelled, "part", "share", scale=100)
    charts.finish(axes, "answer ÷ prompt, tokens", "prefill's share of the latency, %")


def conclusion(rows: Sequence[Row]) -> str:
    """Where decoding takes over."""
    halves, spared = [], []
    for model, own in by_model(rows).items():
        over = [row["answer_tokens"] / row["prompt_tokens"] for row in own if row["share"] < 0.5]
        halves.append(f"{100 * over[0]:.1f} % ({model})" if over else f"none that was measured ({model})")
        last = own[-1]
        again_s = last["share"] * last["total_s"] * last["answer_tokens"] / last["prompt_tokens"]
        spared.append(f"{again_s:.2g} s ({model})")
    shares = [own[-1]["share"] for own in by_model(rows).values()]
    return (
        "`kv.save_answers`, on by default, spares computing an answer again as a part of the next prompt. For an "
        f"answer half as long as its prompt that takes about {listed(spared)}. Decoding takes more than half of the "
        f"time from this share of the prompt's length on: {listed(halves)}. At half the prompt's length prefill's "
        f"share is {100 * min(shares):.0f} to {100 * max(shares):.0f} %."
    )


EXPERIMENT = Experiment(
    NAME,
    "Prefill's share while the answer grows",
    "With the prompt fixed, what share is prefill for answers from 1/160 to 1/2 of it (16K : 0.1K to 16K : 8K)?",
    "kv.save_answers",
    (
        Column("model", "model"),
        Column("prompt_tokens", "prompt", digits=0),
        Column("answer_tokens", "answer", digits=0),
        Column("total_s", "end to end, ms", 1e3, 0, spread=True),
        Column("share", "share, %", 100, 0, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    shown=sampled("answer_tokens", 4),
    note=(
        "Prompts are a quarter of each model's longest on this machine, shorter than 16K. The proportions of prompt "
        "and answer are the same."
    ),
)
