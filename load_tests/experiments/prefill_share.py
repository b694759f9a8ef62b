"""Experiment 1: how much of a chat request's time is prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, bullets, by_model, sampled, spread
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "prefill_share"
LONGEST = 4096


def points(sizes: Sizes) -> list[Point]:
    """A prompt length of a model each; the answer is a chat's."""
    answer = 32 if sizes.quick else 128
    return [
        Point(
            NAME,
            model,
            sizes.plain(model),
            {"prompt_tokens": tokens, "answer_tokens": answer, "repeats": sizes.repeats},
        )
        for model in sizes.models
        for tokens in sizes.prompts(model, LONGEST)
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """One request at a time."""
    values = point.values
    runs = [
        engine.call("run", prompts=[values["prompt_tokens"]], max_tokens=values["answer_tokens"])["requests"][0]
        for _ in range(values["repeats"])
    ]
    return [
        {
            **spread("prefill_s", [times[0] for times in runs]),
            **spread("total_s", [times[-1] for times in runs]),
            **spread("share", [times[0] / times[-1] for times in runs]),
        }
    ]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """The share over the prompt's length."""
    axes = figure.subplots()
    charts.lines(axes, rows, "prompt_tokens", "share", scale=100)
    charts.finish(axes, "prompt, tokens", "prefill's share of the latency, %")


def conclusion(rows: Sequence[Row]) -> str:
    """What `kv.enabled` can save."""
    parts = []
    for model, own in by_model(rows).items():
        short, long = own[0], own[-1]
        parts.append(
            f"{model}: {100 * short['share']:.0f} % at {short['prompt_tokens']:,} tokens, "
            f"{100 * long['share']:.0f} % at {long['prompt_tokens']:,}."
        )
    most = max(row["share"] for row in rows)
    verdict = "stays on by default" if most >= 0.25 else "has little to save here, though it is on by default"
    return (
        f"`kv.enabled` {verdict}. Prefill is the most that reuse can take away: up to {100 * most:.0f} % of a request "
        f"with {rows[0]['answer_tokens']} answered tokens.{bullets(parts)}"
    )


EXPERIMENT = Experiment(
    NAME,
    "Prefill's share of a chat request",
    "What part of the end-to-end latency of a chat request is prefill, by model and prompt length?",
    "kv.enabled",
    (
        Column("model", "model"),
        Column("prompt_tokens", "prompt", digits=0),
        Column("answer_tokens", "answer", digits=0),
        Column("prefill_s", "prefill, ms", 1e3, 0, spread=True),
        Column("total_s", "end to end, ms", 1e3, 0, spread=True),
        Column("share", "share, %", 100, 0, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    shown=sampled("prompt_tokens", 3),
)
