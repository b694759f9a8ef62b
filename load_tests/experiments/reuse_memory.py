"""Experiment 8: the memory of an engine with and without reuse, idle and after serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.settings import Settings
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row, by_model, listed
from load_tests.experiments.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "reuse_memory"
PROMPT = 512
WITHOUT, WITH = "without", "with"


def points(sizes: Sizes) -> list[Point]:
    """With and without, of each model."""
    return [
        Point(NAME, model, engine, {"reuse": reuse, "prompt_tokens": PROMPT, "prompts": 2 if sizes.quick else 8}, True)
        for model in sizes.models
        for reuse, engine in ((WITHOUT, sizes.plain(model)), (WITH, sizes.tiered(model)))
    ]


def measure(point: Point, engine: Engine) -> list[Row]:
    """PSS of the engine's process, and of Ray, the actors and Redis below it."""
    idle = engine.memory_bytes()
    prompts, tokens = point.values["prompts"], point.values["prompt_tokens"]
    stored = {"cpu": 0, "redis": 0}
    if point.values["reuse"] == WITH:
        stored = engine.call("fill", prompts=prompts, tokens=tokens)
    else:
        for _ in range(prompts):
            engine.call("run", prompts=[tokens], max_tokens=1)
    served = engine.memory_bytes()
    return [
        {
            "idle_engine_bytes": idle[0],
            "idle_other_bytes": idle[1],
            "engine_bytes": served[0],
            "other_bytes": served[1],
            "kept_tokens": prompts * tokens if stored["cpu"] else 0,
            "cpu_tier_bytes": stored["cpu"],
            "redis_bytes": stored["redis"],
        }
    ]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """Stacked bars: engine, everything else."""
    axes = figure.subplots()
    states = [(row, state, prefix) for row in rows for state, prefix in (("idle", "idle_"), ("served", ""))]
    names = [f"{row['model']}\n{row['reuse']}, {state}" for row, state, _ in states]
    engines = [row[f"{prefix}engine_bytes"] / 2**20 for row, _, prefix in states]
    others = [row[f"{prefix}other_bytes"] / 2**20 for row, _, prefix in states]
    axes.bar(names, engines, label="engine")
    axes.bar(names, others, bottom=engines, label="Ray, manager, tiers, Redis")
    axes.set_ylabel("PSS, MiB")
    axes.tick_params(axis="x", labelsize="x-small", rotation=90)
    axes.legend(fontsize="small")


def conclusion(rows: Sequence[Row]) -> str:
    """What the CPU tier's budget comes on top of."""
    budget = int(Settings().kv.cpu_tier_bytes)
    parts, outside, holds = [], [], []
    for model, own in by_model(rows).items():
        arms = {row["reuse"]: row for row in own}
        if len(arms) < 2:
            continue
        plain, reusing = arms[WITHOUT], arms[WITH]
        engine, others = (reusing[key] - plain[key] for key in ("idle_engine_bytes", "idle_other_bytes"))
        parts.append(f"{(engine + others) / 2**20:,.0f} MiB ({model})")
        outside.append(f"{others / 2**20:,.0f} MiB ({model})")
        tokens = budget * reusing["kept_tokens"] // max(1, reusing["cpu_tier_bytes"])
        holds.append(f"{tokens:,} tokens ({model})")
    if not parts:
        return "Both arms are needed for a sentence on `kv.cpu_tier_bytes`."
    return (
        f"Before it keeps anything, reuse takes {listed(parts)} more. The processes outside the engine alone take "
        f"{listed(outside)}. A full CPU tier comes on top, `kv.cpu_tier_bytes` = {budget >> 20:,} MiB by default. At "
        f"the weight measured there it holds {listed(holds)}."
    )


EXPERIMENT = Experiment(
    NAME,
    "Memory with and without reuse",
    "How much memory do an engine and all around it take with and without reuse, idle and after serving?",
    "kv.cpu_tier_bytes",
    (
        Column("model", "model"),
        Column("reuse", "reuse"),
        Column("idle_engine_bytes", "engine idle, MiB", 2**-20, 0),
        Column("idle_other_bytes", "others idle, MiB", 2**-20, 0),
        Column("engine_bytes", "engine served, MiB", 2**-20, 0),
        Column("other_bytes", "others served, MiB", 2**-20, 0),
        Column("kept_tokens", "tokens kept", digits=0),
        Column("cpu_tier_bytes", "CPU tier, MiB", 2**-20, 1),
        Column("redis_bytes", "Redis, MiB", 2**-20, 1),
    ),
    points,
    measure,
    plot,
    conclusion,
    note=(
        "PSS. The pools differ: 640 blocks of 32 tokens without reuse, 512 with. One engine; Ray and Redis are shared "
        "by all replicas of a node."
    ),
)
