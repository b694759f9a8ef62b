"""Experiment 4: what KV weighs, by the engine's tensors and by the formula, for our shapes and published ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.settings import Settings
from load_tests.experiments import charts
from load_tests.experiments.experiment import Column, Engine, Experiment, Point, Row
from load_tests.experiments.published import PUBLISHED
from load_tests.experiments.sizes import DTYPE_BYTES, PROMPTS, Sizes
from load_tests.harness.models import SHAPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "kv_bytes"
BLOCK_TOKENS = 32
LONGEST_MEASURED = 2048
REFERENCE = "Llama-3.1-8B"
SHOWN_TOKENS = 1024


def points(sizes: Sizes) -> list[Point]:
    """Measured lengths of each model; published shapes at every length."""
    measured = [
        Point(NAME, model, sizes.plain(model), {"prompt_tokens": tokens})
        for model in sizes.models
        for tokens in sizes.prompts(model, min(LONGEST_MEASURED, max(512, sizes.longest[model] // 4)))
    ]
    computed = [Point(NAME, shape.name, None, {"prompt_tokens": tokens}) for shape in PUBLISHED for tokens in PROMPTS]
    return measured + computed


def formula_bytes(model: str, tokens: int, dtype_bytes: int = 2) -> int:
    """2 · layers · KV heads · head dimension · bytes of a value, for each token."""
    published = {shape.name: shape for shape in PUBLISHED}
    shape = published[model] if model in published else SHAPES[model]
    return shape.kv_bytes_per_token(dtype_bytes) * tokens


def _per_token(row: Row) -> int:
    return int(row["formula_bytes"]) // int(row["prompt_tokens"])


def measure(point: Point, engine: Engine) -> list[Row]:
    """The blocks that a prompt holds while it is computed, times the bytes of a block in the engine's tensors."""
    tokens = point.values["prompt_tokens"]
    if point.engine is None:
        return [{"formula_bytes": formula_bytes(point.model, tokens)}]
    row: Row = {"formula_bytes": formula_bytes(point.model, tokens, DTYPE_BYTES[point.engine.dtype])}
    steps = engine.call("run", prompts=[tokens], max_tokens=1)["steps"]
    blocks = max(held for *_, held in steps)
    return [row | {"blocks": blocks, "measured_bytes": blocks * engine.call("kv_bytes_per_block")}]


def plot(rows: Sequence[Row], figure: Figure) -> None:
    """Bytes over the prompt's length: lines by the formula, crosses where it was measured."""
    axes = figure.subplots()
    charts.lines(axes, rows, "prompt_tokens", "formula_bytes", scale=2**-20)
    measured = [row for row in rows if row.get("measured_bytes")]
    axes.plot(
        [row["prompt_tokens"] for row in measured], [row["measured_bytes"] / 2**20 for row in measured], "kx",
        label="measured", zorder=5,
    )  # fmt: skip
    charts.finish(axes, "prompt, tokens", "KV, MiB", ylog=True)
    axes.legend(fontsize="x-small", ncols=2)


def conclusion(rows: Sequence[Row]) -> str:
    """How far the CPU tier's default goes."""
    measured = [row for row in rows if row.get("measured_bytes")]
    # A prompt holds whole blocks: what is over the formula is at most one block's tokens.
    over = [row["measured_bytes"] - row["formula_bytes"] for row in measured]
    whole = all(0 <= extra < BLOCK_TOKENS * _per_token(row) for extra, row in zip(over, measured, strict=True))
    agreement = "The engine's tensors weigh what the formula says, in whole blocks" if whole else (
        "The engine's tensors differ from the formula by more than a block"
    )  # fmt: skip
    budget = int(Settings().kv.cpu_tier_bytes)
    per_token = formula_bytes(REFERENCE, 1)
    reaches = budget // per_token
    verdict = (
        "That is one long prompt: presets for such models raise it."
        if reaches < 2 * PROMPTS[-1]
        else "Those are many long prompts."
    )
    smallest = min(rows, key=_per_token)
    return (
        f"{agreement}. `kv.cpu_tier_bytes` = {budget >> 20:,} MiB by default holds {reaches:,} tokens of {REFERENCE}, "
        f"{per_token >> 10} KiB each. {verdict} Of {smallest['model']} it holds {budget // _per_token(smallest):,}."
    )


def shown(rows: Sequence[Row]) -> list[Row]:
    """The report's table: one length of every shape."""
    return [row for row in rows if row["prompt_tokens"] == SHOWN_TOKENS]


EXPERIMENT = Experiment(
    NAME,
    "What KV weighs",
    "How many bytes is a prompt's KV, measured and by the formula, here and for published shapes of 7B to 70B?",
    "kv.cpu_tier_bytes",
    (
        Column("model", "model"),
        Column("prompt_tokens", "prompt", digits=0),
        Column("formula_bytes", "formula, MiB", 2**-20, 2),
        Column("measured_bytes", "measured, MiB", 2**-20, 2),
        Column("blocks", "blocks", digits=0),
    ),
    points,
    measure,
    plot,
    conclusion,
    note=(
        "Formula, per token: 2 · layers · KV heads · head dimension · bytes of a value. Published models have 2 bytes "
        "a value; nothing of them is downloaded."
    ),
    shown=shown,
)
