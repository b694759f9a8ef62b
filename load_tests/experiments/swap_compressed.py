"""Experiment 10: the same for Redis with compressed KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, bullets, by_model, spread
from load_tests.experiments.rounds import least_reused, rounds, times_by_source
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "swap_compressed"
LONGEST = 2048
CODECS = ("raw", "lossless", "int8", "cachegen")


def points(sizes: Sizes) -> list[Point]:
    """A codec of a model each."""
    return [
        Point(
            NAME, model, sizes.tiered(model),
            {"codec": codec, "prompt_tokens": tokens, "answer_tokens": 1, "repeats": sizes.repeats},
        )
        for model in sizes.models
        for codec in CODECS
        for tokens in [min(LONGEST, sizes.tiered_prompts(model)[-1])]
    ]  # fmt: skip


def measure(point: Point, engine: Engine) -> list[Row]:
    """Only Redis stores compressed; the CPU tier holds raw bytes."""
    found = rounds(point, engine)
    row = times_by_source(found, "ttft_s", ("none", "redis"))
    row |= spread("out_redis_s", [one["out"]["redis"] for one in found])
    row |= {"kv_bytes": found[-1]["bytes"]["cpu"], "stored_bytes": found[-1]["bytes"]["redis"]}
    return [
        row | {"times_smaller": row["kv_bytes"] / row["stored_bytes"], "redis_reused": least_reused(found, "redis")}
    ]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """What it takes in and out, over how much smaller it is."""
    left, right = figure.subplots(1, 2)
    for axes, key, title in ((left, "redis_ttft_s", "in from Redis"), (right, "out_redis_s", "out to Redis")):
        charts.lines(axes, rows, "times_smaller", key, scale=1e3)
        for row in rows:
            axes.annotate(row["codec"], (row["times_smaller"], 1e3 * row[key]), fontsize="x-small")
        if key == "redis_ttft_s":
            charts.lines(axes, rows, "times_smaller", "none_ttft_s", scale=1e3, tail=", recompute")
        charts.finish(axes, "times smaller than raw", f"{title}, ms", xlog=False, ylog=True)


def conclusion(rows: Sequence[Row]) -> str:
    """What compression costs where the link costs nothing."""
    parts, dearer = [], 0
    for model, own in by_model(rows).items():
        codecs = {row["codec"]: row for row in own}
        if "raw" not in codecs or "lossless" not in codecs:
            continue
        raw = codecs["raw"]
        words = [
            f"{codec} {row['times_smaller']:.1f} and {row['redis_ttft_s'] / raw['redis_ttft_s']:.2f}"
            for codec, row in codecs.items()
            if codec != "raw"
        ]
        dearer += codecs["lossless"]["redis_ttft_s"] > 1.1 * raw["redis_ttft_s"]
        parts.append(f"{model}: {', '.join(words)}")
    if not parts:
        return "Raw and lossless are both needed for a sentence on `kv.redis_codec`."
    verdict = (
        "pays in time for room and for slower links. With Redis on the same machine and room enough `raw` is faster"
        if dearer
        else "costs nothing noticeable even with Redis on the same machine, so it stays"
    )
    return (
        f"`lossless`, the default of `kv.redis_codec`, {verdict}. Times smaller than raw, and swap-in ÷ raw "
        f"swap-in:{bullets(parts)}"
    )


EXPERIMENT = Experiment(
    NAME,
    "Swap with compressed KV",
    "How do swap-in and swap-out change with compressed KV in Redis?",
    "kv.redis_codec",
    (
        Column("model", "model"),
        Column("codec", "codec"),
        Column("prompt_tokens", "prompt", digits=0),
        Column("kv_bytes", "KV, MiB", 2**-20, 1),
        Column("times_smaller", "times smaller", 1, 2),
        Column("none_ttft_s", "recompute, ms", 1e3, 0, spread=True),
        Column("redis_ttft_s", "Redis in, ms", 1e3, 0, spread=True),
        Column("redis_ratio", "÷ recompute", 1, 2, spread=True),
        Column("redis_reused", "from Redis, %", 100, 0),
        Column("out_redis_s", "Redis out, ms", 1e3, 0, spread=True),
    ),
    points,
    measure,
    plot,
    conclusion,
    note=(
        "Redis is on the same machine: its link is memory. KV of random weights; generic codec profile; cachegen at "
        "level 2. int8 and cachegen are for tolerant prompts only."
    ),
)
