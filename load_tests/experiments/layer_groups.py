"""An experiment: which layers may lose tokens of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from load_tests.experiments.columns import MODEL, Column, Row
from load_tests.experiments.experiment import Experiment, Panel, Point
from load_tests.experiments.sizes import Sizes
from load_tests.measuring import plots
from load_tests.measuring.report import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL_NAME = "demo"
"""The shapes of the study have random weights, which answer nothing."""
QUESTIONS, QUICK_QUESTIONS = 550, 22
MOST_KL = 0.002


class LayerGroups(Experiment):
    """One third of the layers, or one layer, keeps a quarter of its tokens; all others keep everything."""

    name = "layer_groups"
    title = "Which layers may lose tokens"
    question = "How much is lost when one third of the layers, or one layer, keeps only 25 % of its tokens' KV?"
    setting = "kv.tolerant_level"
    columns = (
        MODEL,
        Column("group", "group"),
        Column("layers", "layers"),
        Column("kept", "KV kept, %", 100, 1),
        Column("questions", "questions", digits=0),
        Column("lost", "lost", digits=0),
        Column("gained", "gained", digits=0),
        Column("kl", "KL, nats", digits=5),
    )
    panels: ClassVar[tuple[Panel, ...]] = ()
    note = (
        "The demo model on held-out questions, KV of bfloat16, computed in float32; tokens by attention mass, "
        "the last 8 of each segment always. More: `make bench-sparse`."
    )

    def points(self, sizes: Sizes) -> list[Point]:
        """One, of the one model that answers questions."""
        return [Point(self.name, MODEL_NAME, None, {"asked": QUICK_QUESTIONS if sizes.quick else QUESTIONS})]

    def measure(self, point: Point, engine: Any) -> list[Row]:
        """A row for each group; the model runs in this process."""
        from load_tests.codec.model import kv_shape, load_model  # transformers
        from load_tests.codec.questions import DEMO, conversations
        from load_tests.codec.table import SEED
        from load_tests.sparse.judge import cost_of, hold
        from load_tests.sparse.layer_groups import group_rows
        from load_tests.sparse.masked_model import MaskedModel

        masked = MaskedModel(load_model(DEMO))
        held = hold(masked, conversations(point.values["asked"], SEED))
        return group_rows(kv_shape(masked.model)[0], lambda budgets: cost_of(masked, held, budgets))

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """A bar for each group."""
        answers, divergence = figure.subplots(1, 2)
        names = [row["group"] for row in rows]
        answers.bar(names, [100 * row["lost"] / row["questions"] for row in rows])
        divergence.bar(names, [max(row["kl"], 1e-6) for row in rows])
        plots.finish(answers, "", "answers lost, %")
        plots.finish(divergence, "", "KL, nats (1e-6: none)", ylog=True)
        for axes in (answers, divergence):
            axes.tick_params(axis="x", rotation=60)

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Which layers are free, and whether thirds would have told."""
        single = [row for row in rows if row["group"].startswith("layer ")]
        free = [row["layers"] for row in single if row["kl"] <= MOST_KL]
        dear = [row["layers"] for row in single if row["kl"] > MOST_KL]
        thirds = [row["group"] for row in rows if row not in single and row["kl"] <= MOST_KL]
        verdict = "Rounding by `kv.tolerant_level` takes KV of every layer, but not every layer may lose tokens."
        if not free:
            return f"{verdict} None of them may."
        layers = f"{'layers' if len(free) > 1 else 'layer'} {listed(free)}"
        return (
            f"{verdict} With a KL of at most {MOST_KL} it is {layers}{f', not {listed(dear)}' if dear else ''}. "
            f"Thirds would have found {listed(thirds) if thirds else 'none'}: budgets are measured layer by layer."
        )
