"""Experiment 11: forward latency over the tokens of one pass, on which SplitFuse's fixed budget rests.

Holmes et al., "DeepSpeed-FastGen" (2024), section 3: a pass costs about the same until the processor is saturated, and
linearly more after, so passes should have as many tokens as saturate it, and not more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.settings import Settings
from load_tests.experiments import charts
from load_tests.experiments.engine_specs import WIDEST_STEP_TOKENS
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, bullets, by_model, sampled, spread
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "tokens_per_pass"
EACH = 64
"""Tokens of each sequence in a pass: so short that attention does not matter."""
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_TOKENS = (1, 16, 64, 256, 1024)
SATURATED = 0.9
"""Of the best tokens/s."""


def points(sizes: Sizes) -> list[Point]:
    """Tokens of a pass of a model each."""
    return [
        Point(NAME, model, sizes.plain(model), {"tokens": tokens, "repeats": sizes.repeats})
        for model in sizes.models
        for tokens in (QUICK_TOKENS if sizes.quick else TOKENS)
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """One pass over sequences of `EACH` tokens, or over one shorter one; the first run only warms up."""
    tokens = point.values["tokens"]
    prompts = [EACH] * (tokens // EACH) if tokens >= EACH else [tokens]
    passes = []
    for _ in range(point.values["repeats"] + 1):
        steps = engine.call("run", prompts=prompts, max_tokens=1, step_tokens=WIDEST_STEP_TOKENS)["steps"]
        passes.append(next(seconds for count, _, seconds, _ in steps if count == tokens))
    row = spread("pass_s", passes[1:])
    return [row | {"tokens_per_s": tokens / row["pass_s"]}]


def saturating_tokens(rows: Sequence[Row]) -> int:
    """The fewest tokens with `SATURATED` of the best tokens/s of these rows."""
    best = max(row["tokens_per_s"] for row in rows)
    return min(row["tokens"] for row in rows if row["tokens_per_s"] >= SATURATED * best)


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """Latency of a pass, and tokens per second."""
    left, right = figure.subplots(1, 2)
    charts.lines(left, rows, "tokens", "pass_s", scale=1e3)
    charts.finish(left, "tokens in one pass", "one pass, ms", ylog=True)
    charts.lines(right, rows, "tokens", "tokens_per_s")
    charts.finish(right, "tokens in one pass", "tokens/s", ylog=True)
    for axes in (left, right):
        axes.axvline(Settings().max_num_batched_tokens, color="grey", linestyle="--")


def conclusion(rows: Sequence[Row]) -> str:
    """What the token budget should be."""
    budget = Settings().max_num_batched_tokens
    parts, knees = [], []
    for model, own in by_model(rows).items():
        knee = saturating_tokens(own)
        knees.append(knee)
        largest = own[-1]
        parts.append(
            f"{model}: {knee:,}; a pass of {largest['tokens']:,} holds up everybody's decoding for "
            f"{largest['pass_s']:.2g} s"
        )
    if max(knees) <= budget:
        verdict = f"The default `engine.max_num_batched_tokens` = {budget:,} saturates every model"
        if max(knees) <= budget // 4:
            verdict += f", and {max(knees):,} would do so with shorter waits for decoding streams"
    else:
        verdict = (
            f"`engine.max_num_batched_tokens` = {budget:,} leaves throughput on the table; {max(knees):,} would not"
        )
    return f"{verdict}. Nine tenths of the best tokens/s need passes of this many tokens:{bullets(parts)}"


EXPERIMENT = Experiment(
    NAME,
    "Forward latency by tokens per pass",
    "How long does one forward pass take by its number of tokens, and how many saturate the processor (SplitFuse)?",
    "engine.max_num_batched_tokens",
    (
        Column("model", "model"),
        Column("tokens", "tokens in the pass", digits=0),
        Column("pass_s", "one pass, ms", 1e3, 1, spread=True),
        Column("tokens_per_s", "tokens/s", digits=0),
    ),
    points,
    measure,
    plot,
    conclusion,
    shown=sampled("tokens", 5),
    note=f"Sequences of {EACH} tokens, as many as make up the pass. A step is scheduling, forward pass and sampling.",
)
