"""Experiments 4 and 8: what KV weighs, and what memory reuse takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from configs.settings import Settings
from load_tests.experiments.columns import MODEL, PROMPT, Column, Row, mib
from load_tests.experiments.experiment import Experiment, Point, by_model
from load_tests.experiments.sizes import DTYPE_BYTES, PROMPTS, Sizes
from load_tests.harness.engine_process import EngineProcess
from load_tests.harness.models import SHAPES
from load_tests.measuring import plots
from load_tests.measuring.report import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK_TOKENS = 32


class Published(NamedTuple):
    """A published model with full attention in every layer, from its config.json on the Hugging Face hub."""

    layers: int
    kv_heads: int
    head_dim: int = 128

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """2 (K and V) · layers · KV heads · head dimension · bytes of a value."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


PUBLISHED = {
    "Llama-2-7B": Published(32, 32),
    "Llama-2-13B": Published(40, 40),
    "Llama-2-70B": Published(80, 8),
    "Llama-3.1-8B": Published(32, 8),
    "Llama-3.1-70B": Published(80, 8),
    "Qwen2.5-7B": Published(28, 4),
    "Qwen2.5-14B": Published(48, 8),
    "Qwen2.5-32B": Published(64, 8),
    "Qwen3-8B": Published(36, 8),
}


def formula_bytes(model: str, tokens: int, dtype_bytes: int = 2) -> int:
    """2 · layers · KV heads · head dimension · bytes of a value, for each token."""
    shape = PUBLISHED[model] if model in PUBLISHED else SHAPES[model]
    return shape.kv_bytes_per_token(dtype_bytes) * tokens


def _per_token(row: Row) -> int:
    return int(row["formula_bytes"]) // int(row["prompt_tokens"])


class KVBytes(Experiment):
    """What KV weighs, by the engine's tensors and by the formula, for our shapes and published ones."""

    name = "kv_bytes"
    title = "What KV weighs"
    question = (
        "How many bytes is a prompt's KV, measured and by the formula, here and for published shapes of 7B to 70B?"
    )
    setting = "kv.cpu_tier_bytes"
    columns = (
        MODEL, PROMPT, mib("formula_bytes", "formula", 2), mib("measured_bytes", "measured", 2),
        Column("blocks", "blocks", digits=0),
    )  # fmt: skip
    note = (
        "Formula, per token: 2 · layers · KV heads · head dimension · bytes of a value. Published models have 2 bytes "
        "a value; nothing of them is downloaded."
    )
    longest_measured = 2048
    reference = "Llama-3.1-8B"
    shown_tokens = 1024

    def points(self, sizes: Sizes) -> list[Point]:
        """Measured lengths of each model; published shapes at every length."""
        measured = [
            Point(self.name, model, sizes.engine(model), {"prompt_tokens": tokens})
            for model in sizes.models
            for tokens in sizes.prompts(model, min(self.longest_measured, max(512, sizes.longest[model] // 4)))
        ]
        return measured + [
            Point(self.name, model, None, {"prompt_tokens": tokens}) for model in PUBLISHED for tokens in PROMPTS
        ]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """The blocks that a prompt holds while it is computed, times the bytes of a block in the engine's tensors."""
        tokens = point.values["prompt_tokens"]
        if point.engine is None:
            return [{"formula_bytes": formula_bytes(point.model, tokens)}]
        row: Row = {"formula_bytes": formula_bytes(point.model, tokens, DTYPE_BYTES[point.engine.dtype])}
        steps = engine.call("run", prompts=[tokens], max_tokens=1)["steps"]
        blocks = max(held for *_, held in steps)
        return [row | {"blocks": blocks, "measured_bytes": blocks * engine.call("kv_bytes_per_block")}]

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """Bytes over the prompt's length: lines by the formula, crosses where it was measured."""
        axes = figure.subplots()
        plots.lines(axes, rows, "prompt_tokens", "formula_bytes", scale=2**-20)
        crosses = [(row["prompt_tokens"], row["measured_bytes"] / 2**20) for row in rows if row.get("measured_bytes")]
        axes.plot(*zip(*crosses, strict=True), "kx", label="measured", zorder=5)
        plots.finish(axes, "prompt, tokens", "KV, MiB", ylog=True)
        axes.legend(fontsize="x-small", ncols=2)

    def conclusion(self, rows: Sequence[Row]) -> str:
        """How far the CPU tier's default goes."""
        measured = [row for row in rows if row.get("measured_bytes")]
        # A prompt holds whole blocks: what is over the formula is at most one block's tokens.
        over = [row["measured_bytes"] - row["formula_bytes"] for row in measured]
        whole = all(0 <= extra < BLOCK_TOKENS * _per_token(row) for extra, row in zip(over, measured, strict=True))
        agreement = "weigh what the formula says, in whole blocks" if whole else (
            "differ from the formula by more than a block"
        )  # fmt: skip
        budget = int(Settings().kv.cpu_tier_bytes)
        per_token = formula_bytes(self.reference, 1)
        reaches = budget // per_token
        verdict = (
            "That is one long prompt: presets for such models raise it."
            if reaches < 2 * PROMPTS[-1]
            else "Those are many long prompts."
        )
        smallest = min(rows, key=_per_token)
        return (
            f"The engine's tensors {agreement}. `kv.cpu_tier_bytes` = {budget >> 20:,} MiB by default holds "
            f"{reaches:,} tokens of {self.reference}, {per_token >> 10} KiB each. {verdict} Of {smallest['model']} it "
            f"holds {budget // _per_token(smallest):,}."
        )

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """One length of every shape."""
        return [row for row in rows if row["prompt_tokens"] == self.shown_tokens]


class ReuseMemory(Experiment):
    """The memory of an engine with and without reuse, idle and after serving."""

    name = "reuse_memory"
    title = "Memory with and without reuse"
    question = "How much memory do an engine and all around it take with and without reuse, idle and after serving?"
    setting = "kv.cpu_tier_bytes"
    columns = (
        MODEL,
        Column("reuse", "reuse"),
        mib("idle_engine_bytes", "engine idle", 0),
        mib("idle_other_bytes", "others idle", 0),
        mib("engine_bytes", "engine served", 0),
        mib("other_bytes", "others served", 0),
        Column("kept_tokens", "tokens kept", digits=0),
        mib("cpu_tier_bytes", "CPU tier"),
        mib("redis_bytes", "Redis"),
    )
    note = (
        "PSS. The pools differ: 640 blocks of 32 tokens without reuse, 512 with. One engine; Ray and Redis are shared "
        "by all replicas of a node."
    )

    def points(self, sizes: Sizes) -> list[Point]:
        """With and without, of each model."""
        values = {"prompt_tokens": 512, "prompts": 2 if sizes.quick else 8}
        return [
            Point(self.name, model, engine, {"reuse": reuse, **values}, first=True)
            for model in sizes.models
            for reuse, engine in (("without", sizes.engine(model)), ("with", sizes.engine(model, tiered=True)))
        ]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """PSS of the engine's process, and of Ray, the actors and Redis below it."""
        idle = engine.memory_bytes()
        prompts, tokens = point.values["prompts"], point.values["prompt_tokens"]
        stored = {"cpu": 0, "redis": 0}
        if point.values["reuse"] == "with":
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

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
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

    def conclusion(self, rows: Sequence[Row]) -> str:
        """What the CPU tier's budget comes on top of."""
        budget = int(Settings().kv.cpu_tier_bytes)
        parts, outside, holds = [], [], []
        for model, own in by_model(rows).items():
            arms = {row["reuse"]: row for row in own}
            if len(arms) < 2:
                continue
            plain, reusing = arms["without"], arms["with"]
            engine, others = (reusing[key] - plain[key] for key in ("idle_engine_bytes", "idle_other_bytes"))
            parts.append(f"{(engine + others) / 2**20:,.0f} MiB ({model})")
            outside.append(f"{others / 2**20:,.0f} MiB ({model})")
            tokens = budget * reusing["kept_tokens"] // max(1, reusing["cpu_tier_bytes"])
            holds.append(f"{tokens:,} tokens ({model})")
        if not parts:
            return "Both arms are needed for a sentence on `kv.cpu_tier_bytes`."
        return (
            f"Before it keeps anything, reuse takes {listed(parts)} more. The processes outside the engine alone take "
            f"{listed(outside)}. A full CPU tier comes on top, `kv.cpu_tier_bytes` = {budget >> 20:,} MiB by default. "
            f"At the weight measured there it holds {listed(holds)}."
        )
