"""Experiment 6: what more requests in a batch do to a prefill step, and to a decode step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.settings import Settings
from load_tests.experiments import charts
from load_tests.experiments.engine_specs import WIDEST_STEP_TOKENS
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, bullets, by_model, sampled, spread
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "micro_batch"
PROMPT, ANSWER = 64, 12


def points(sizes: Sizes) -> list[Point]:
    """A batch of a model each."""
    return [
        Point(NAME, model, sizes.plain(model), {"batch": batch, "prompt_tokens": PROMPT, "repeats": sizes.repeats})
        for model in sizes.models
        for batch in sizes.batches
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """The step that prefills all prompts, and the median of those that decode all; the first run only warms up."""
    batch, prompt = point.values["batch"], point.values["prompt_tokens"]
    prefills, decodes = [], []
    for _ in range(point.values["repeats"] + 1):
        steps = engine.call("run", prompts=[prompt] * batch, max_tokens=ANSWER, step_tokens=WIDEST_STEP_TOKENS)["steps"]
        prefills.append(next(seconds for tokens, _, seconds, _ in steps if tokens == batch * prompt))
        decodes.append(statistics.median(seconds for tokens, _, seconds, _ in steps if tokens == batch))
    return [{**spread("prefill_s", prefills[1:]), **spread("decode_s", decodes[1:])}]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """Latencies of a step, and what a token costs."""
    left, right = figure.subplots(1, 2)
    charts.lines(left, rows, "batch", "prefill_s", scale=1e3, tail=", prefill")
    charts.lines(left, rows, "batch", "decode_s", scale=1e3, tail=", decode")
    charts.finish(left, f"requests in the batch ({PROMPT} tokens each)", "one step, ms", ylog=True)
    each = [
        {
            **row,
            "prefill": 1e3 * row["prefill_s"] / row["batch"] / PROMPT,
            "decode": 1e3 * row["decode_s"] / row["batch"],
        }
        for row in rows
    ]
    charts.lines(right, each, "batch", "prefill", tail=", prefill")
    charts.lines(right, each, "batch", "decode", tail=", decode")
    charts.finish(right, "requests in the batch", "per token, ms", ylog=True)


def conclusion(rows: Sequence[Row]) -> str:
    """Whether batching pays up to `engine.max_num_seqs`."""
    seqs = Settings().engine.max_num_seqs
    parts, gains = [], []
    for model, own in by_model(rows).items():
        first, last = own[0], own[-1]
        prefill, decode = (last[key] / first[key] for key in ("prefill_s", "decode_s"))
        gains.append(last["batch"] / decode)
        parts.append(f"{model}: a prefill step {prefill:.1f} times, a decode step {decode:.1f} times")
    batch = rows[-1]["batch"]
    verdict = (
        f"A batch pays in decoding: `engine.max_num_seqs` = {seqs} stays."
        if min(gains) > 1.2
        else f"A batch does not pay for every model, which a lower `engine.max_num_seqs` than {seqs} would suit."
    )
    return (
        f"{verdict} Decoding {batch} requests at once gives {min(gains):.1f} to {max(gains):.1f} times the tokens/s "
        f"of one. Steps with {batch} requests take this many times as long:{bullets(parts)}"
    )


EXPERIMENT = Experiment(
    NAME,
    "Micro-batch size",
    "How do prefill and decode latency grow with the number of requests in a batch?",
    "engine.max_num_seqs",
    (
        Column("model", "model"),
        Column("batch", "batch", digits=0),
        Column("prefill_s", "prefill step, ms", 1e3, 1, spread=True),
        Column("decode_s", "decode step, ms", 1e3, 1, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    shown=sampled("batch", 3),
    note=f"All prompts ({PROMPT} tokens each) in one step, then all decode together.",
)
