"""Experiment 2: prefill latency over the prompt's length, and what of it is there for every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.settings import Settings
from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, bullets, by_model, sampled, spread
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "prefill_length"
SHORTEST = 16
"""One block and less: what is left then is the fixed cost."""


def points(sizes: Sizes) -> list[Point]:
    """A prompt length of a model each."""
    return [
        Point(NAME, model, sizes.plain(model), {"prompt_tokens": tokens, "repeats": sizes.repeats})
        for model in sizes.models
        for tokens in [SHORTEST, *sizes.prompts(model)]
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """One prompt at a time, one answered token; steps of the default size."""
    runs = [
        engine.call("run", prompts=[point.values["prompt_tokens"]], max_tokens=1)["requests"][0][0]
        for _ in range(point.values["repeats"])
    ]
    return [spread("prefill_s", runs)]


def fitted(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Seconds: fixed, per token, per pair of tokens; least squares on relative errors, without negative terms.

    The model of `docs/concepts/loading.md`: prefill = fixed + per_token · n + per_pair · n² / 2.
    """
    import numpy as np

    lengths = np.array([row["prompt_tokens"] for row in rows], float)
    seconds = np.array([row["prefill_s"] for row in rows])
    terms = np.stack([np.ones_like(lengths), lengths, lengths**2 / 2], axis=1) / seconds[:, None]
    best, least = (0.0, 0.0, 0.0), float("inf")
    for chosen in ([0, 1, 2], [0, 1], [1, 2], [0, 2], [1], [2], [0]):  # of all subsets the best without negative terms
        if len(chosen) > len(rows):
            continue
        found, *_ = np.linalg.lstsq(terms[:, chosen], np.ones_like(lengths), rcond=None)
        error = float(((terms[:, chosen] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            least = error
            filled = np.zeros(3)
            filled[chosen] = found
            best = (float(filled[0]), float(filled[1]), float(filled[2]))
    return best


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """Latency, and tokens per second."""
    left, right = figure.subplots(1, 2)
    charts.lines(left, rows, "prompt_tokens", "prefill_s")
    charts.finish(left, "prompt, tokens", "prefill, s", ylog=True)
    rates = [{**row, "rate": row["prompt_tokens"] / row["prefill_s"]} for row in rows]
    for model, own in by_model(rates).items():
        right.plot([row["prompt_tokens"] for row in own], [row["rate"] for row in own], "o-", label=model)
    charts.finish(right, "prompt, tokens", "prefill, tokens/s", ylog=True)


def conclusion(rows: Sequence[Row]) -> str:
    """Whether a segment is long enough to be worth its handling."""
    segment = Settings().kv.segment_tokens
    parts, shares = [], []
    for model, own in by_model(rows).items():
        fixed, per_token, per_pair = fitted(own)
        cost = per_token * segment + per_pair * segment**2 / 2
        shares.append(fixed / (fixed + cost))
        growth = f"{1e3 * per_token * 1000:,.0f} ms per 1,000 tokens"
        if per_pair:
            growth += f", and twice that at token {per_token / per_pair:,.0f}" if per_token else ", and growing"
        parts.append(f"{model}: {1e3 * fixed:.1f} ms fixed, {growth}.")
    verdict = (
        "Most of what a segment costs is work that reuse saves: the default stays."
        if max(shares) < 0.5
        else "For some model the fixed part outweighs a segment's own work: a longer segment would save more."
    )
    return (
        f"Of computing `kv.segment_tokens` = {segment} tokens, {100 * min(shares):.0f} to {100 * max(shares):.0f} % "
        f"is a prompt's fixed cost. {verdict}{bullets(parts)}"
    )


EXPERIMENT = Experiment(
    NAME,
    "Prefill latency by prompt length",
    "How does prefill latency grow from 0.1K to 16K tokens, and what is its fixed cost?",
    "kv.segment_tokens",
    (
        Column("model", "model"),
        Column("prompt_tokens", "prompt", digits=0),
        Column("prefill_s", "prefill, ms", 1e3, 1, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    shown=sampled("prompt_tokens", 5),
    note="Longest prompts by model: see Sizes.",
)
