"""What an experiment consists of: the points to measure, the rows that each gives, a plot, and a conclusion."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from load_tests.experiments.columns import Column, Row
from load_tests.measuring import plots
from load_tests.measuring.spread import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from load_tests.experiments.sizes import EngineSpec, Sizes
    from load_tests.harness.engine_process import EngineProcess


@dataclass(frozen=True)
class Point:
    """One measurement. `engine` None: it is computed. `first`: before anything else has used that engine."""

    experiment: str
    model: str
    engine: EngineSpec | None
    values: Mapping[str, Any]
    first: bool = False

    @property
    def key(self) -> str:
        """Names the measurement in the journal: everything that decides what is measured."""
        dtype = {"dtype": self.engine.dtype} if self.engine is not None else {}
        return json.dumps({"experiment": self.experiment, "model": self.model, **dtype, **self.values}, sort_keys=True)


@dataclass(frozen=True)
class Panel:
    """`ys` over `x`, a line for each model; `tails` tell several `ys` apart."""

    x: str
    ys: tuple[str, ...]
    xlabel: str
    ylabel: str
    scale: float = 1.0
    xlog: bool = True
    ylog: bool = True
    tails: tuple[str, ...] = ("", "")


class Experiment(ABC):
    """`setting`: whose default the conclusion speaks of (docs/guide/settings.md). `note`: what to know of the table."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    setting: ClassVar[str]
    columns: ClassVar[tuple[Column, ...]]
    panels: ClassVar[tuple[Panel, ...]] = ()
    note: ClassVar[str] = ""
    sample: ClassVar[tuple[str, int] | None] = None
    """A key, and how many of its values the report shows at most for each model; None: all."""

    tiered: ClassVar[bool] = False
    """Whether the engine has KV reuse, a CPU tier and Redis."""

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """What is measured of a model, each as often as `sizes` says."""
        raise NotImplementedError

    def points(self, sizes: Sizes) -> list[Point]:
        """Of all models, in their order."""
        return [
            Point(self.name, model, sizes.engine(model, self.tiered), {**values, "repeats": sizes.repeats})
            for model in sizes.models
            for values in self.values(sizes, model)
        ]

    @abstractmethod
    def measure(self, point: Point, engine: Any) -> list[Row]:
        """Ask a running engine (None for a point without one); rows without model and values, which `runner` adds."""

    @abstractmethod
    def conclusion(self, rows: Sequence[Row]) -> str:
        """A few short sentences, computed from all rows."""

    def plotted(self, row: Row) -> Row:
        """The row with what only the plot shows."""
        return row

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """The panels, side by side."""
        drawn = [self.plotted(row) for row in rows]
        for axes, panel in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels, strict=True):
            for y, tail in zip(panel.ys, panel.tails, strict=False):
                plots.lines(axes, drawn, panel.x, y, scale=panel.scale, tail=tail)
            plots.finish(axes, panel.xlabel, panel.ylabel, panel.xlog, panel.ylog)

    def shown(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Which rows stand in the report; the CSV has all."""
        return sampled(rows, *self.sample) if self.sample else rows


def runs(
    point: Point, engine: EngineProcess, prompts: Iterable[int], max_tokens: int, **named: Any
) -> list[dict[str, Any]]:
    """As often as the point says, new prompts of these lengths at once (`engines.plain.PlainEngine.run`)."""
    lengths = list(prompts)
    return [engine.call("run", prompts=lengths, max_tokens=max_tokens, **named) for _ in range(point.values["repeats"])]


def spread(key: str, values: Sequence[float]) -> Row:
    """Median, least and most under `key`, `key_min` and `key_max`."""
    return dict(Spread.of(values).as_row(key))


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each model, in the order of the rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return found


def sampled(rows: Sequence[Row], key: str, most: int) -> list[Row]:
    """Of each model the rows of at most `most` values of `key`, evenly spread, both ends in."""
    chosen = []
    for own in by_model(rows).values():
        values = list(dict.fromkeys(row[key] for row in own))
        places = min(most, len(values))
        kept = {values[round(place * (len(values) - 1) / max(1, places - 1))] for place in range(places)}
        chosen += [row for row in own if row[key] in kept]
    return chosen
