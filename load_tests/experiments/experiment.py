"""What an experiment consists of: the points to measure, the rows that each gives, a plot, and a conclusion."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from load_tests.experiments.columns import Column, Row
from load_tests.measuring import plots
from load_tests.measuring.spread import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from load_tests.experiments.engine_specs import EngineSpec
    from load_tests.experiments.sizes import Sizes


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


class Engine(Protocol):
    """A running engine in another process (`load_tests.harness.engine_process`)."""

    def call(self, method: str, **arguments: Any) -> Any:
        """What a method of its host returns."""
        ...

    def memory_bytes(self) -> tuple[int, int]:
        """PSS of its process, and of all processes below it together."""
        ...


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
    """The report shows the rows of at most so many values of this key, for each model; None: all."""

    @abstractmethod
    def points(self, sizes: Sizes) -> list[Point]:
        """All of the experiment."""

    @abstractmethod
    def measure(self, point: Point, engine: Any) -> list[Row]:
        """Ask a running `Engine` (None for a point without one); rows without model and values, which `runner` adds."""

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

    def point(self, sizes: Sizes, engine: EngineSpec, **values: Any) -> Point:
        """One that is repeated."""
        return Point(self.name, engine.model, engine, {**values, "repeats": sizes.repeats})


def runs(point: Point, engine: Engine, prompts: Iterable[int], max_tokens: int, **named: Any) -> list[dict[str, Any]]:
    """As often as the point says, new prompts of these lengths at once (`plain_engine.PlainEngine.run`)."""
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
