"""Experiment 5: KV by batch size, and the batch where KV, not the processor, ends the throughput's growth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.settings import Settings
from load_tests.experiments import charts
from load_tests.experiments.experiment import (
    Column,
    Engine,
    Experiment,
    Point,
    Row,
    bullets,
    by_model,
    listed,
    sampled,
    spread,
)
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "batch_limits"
BLOCK_TOKENS = 32
PROMPT, ANSWER = 96, 64
REQUEST_BLOCKS = -(-(PROMPT + ANSWER) // BLOCK_TOKENS)
POOL_REQUESTS = 10
"""The pool holds the KV of so many whole requests."""


def points(sizes: Sizes) -> list[Point]:
    """A batch of a model each."""
    values = {"prompt_tokens": PROMPT, "answer_tokens": ANSWER, "pool_blocks": POOL_REQUESTS * REQUEST_BLOCKS}
    return [
        Point(NAME, model, sizes.plain(model), {"batch": batch, **values, "repeats": sizes.repeats})
        for model in sizes.models
        for batch in sizes.batches
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """The batch at once, in a pool of `pool_blocks`."""
    values = point.values
    batch = values["batch"]
    block_bytes = engine.call("kv_bytes_per_block")
    rates, most_blocks, most_running = [], [], []
    for _ in range(values["repeats"]):
        found = engine.call(
            "run", prompts=[values["prompt_tokens"]] * batch, max_tokens=values["answer_tokens"],
            pool_blocks=values["pool_blocks"],
        )  # fmt: skip
        seconds = max(times[-1] for times in found["requests"])
        rates.append(batch * values["answer_tokens"] / seconds)
        most_running.append(max(requests for _, requests, *_ in found["steps"]))
        most_blocks.append(max(held for *_, held in found["steps"]))
    return [
        {
            **spread("tokens_per_s", rates),
            "running": max(most_running),
            "kv_bytes": max(most_blocks) * block_bytes,
            "pool_bytes": values["pool_blocks"] * block_bytes,
        }
    ]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """KV held as a part of the pool, and throughput."""
    left, right = figure.subplots(1, 2)
    parts = [{**row, "part": row["kv_bytes"] / row["pool_bytes"]} for row in rows]
    charts.lines(left, parts, "batch", "part", scale=100)
    left.axhline(100, color="grey", linestyle="--")
    charts.finish(left, "requests at once", "KV held, % of the pool")
    charts.lines(right, rows, "batch", "tokens_per_s")
    charts.finish(right, "requests at once", "answered tokens/s", ylog=True)


def capped_batch(rows: Sequence[Row]) -> int | None:
    """The smallest measured batch that filled the pool; None: none did."""
    return next((row["batch"] for row in rows if row["kv_bytes"] >= row["pool_bytes"]), None)


def conclusion(rows: Sequence[Row]) -> str:
    """What `engine.device_blocks` must be for `engine.max_num_seqs`."""
    settings = Settings()
    caps, gains = [], []
    for model, own in by_model(rows).items():
        capped = capped_batch(own)
        if capped is None:
            caps.append(f"more than {own[-1]['batch']} ({model})")
            continue
        caps.append(f"{capped} ({model})")
        if before := [row for row in own if row["batch"] < capped]:
            gain = own[-1]["tokens_per_s"] / before[-1]["tokens_per_s"]
            gains.append(
                f"{model}: batch {own[-1]['batch']} gives {gain:.2f} times the tokens/s of batch {before[-1]['batch']}."
            )
    tokens = (settings.device_blocks or 0) * settings.block_size_tokens
    seqs = settings.engine.max_num_seqs
    each = tokens // seqs
    return (
        f"`engine.device_blocks` by default holds {tokens:,} tokens. So all {seqs} requests of `engine.max_num_seqs` "
        f"run at once only while each has at most {each} tokens: raise it for longer ones. The pool of this "
        f"experiment is full from a batch of {listed(caps)}. Requests beyond it wait or lose their KV to others."
        f"{bullets(gains)}"
    )


EXPERIMENT = Experiment(
    NAME,
    "KV by batch size",
    "How does KV grow with the batch, and from which batch on does KV cap the throughput?",
    "engine.device_blocks",
    (
        Column("model", "model"),
        Column("batch", "batch", digits=0),
        Column("running", "most at once", digits=0),
        Column("kv_bytes", "KV held, MiB", 2**-20, 1),
        Column("pool_bytes", "pool, MiB", 2**-20, 1),
        Column("tokens_per_s", "answered tokens/s", 1, 0, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    shown=sampled("batch", 4),
    note=f"Prompts of {PROMPT} and answers of {ANSWER} tokens; a pool for the KV of {POOL_REQUESTS} such requests.",
)
