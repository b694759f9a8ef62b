"""What an experiment consists of: the points to measure, the rows that each gives, a plot, and a conclusion."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from load_tests.experiments.engine_specs import EngineSpec
    from load_tests.experiments.sizes import Sizes

Row = dict[str, Any]
"""One line of an experiment's CSV."""


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
class Column:
    """A column of the report's table. `scale` is multiplied in; with `spread` the least and the most stand beside."""

    key: str
    title: str
    scale: float = 1.0
    digits: int = 1
    spread: bool = False

    def cell(self, row: Row) -> str:
        """For Markdown; empty when the row has no such value."""
        value = row.get(self.key)
        if value is None or isinstance(value, str):
            return value or ""
        text = self._number(value)
        if not self.spread:
            return text
        return f"{text} ({self._number(row[f'{self.key}_min'])}\u2013{self._number(row[f'{self.key}_max'])})"

    def _number(self, value: float) -> str:
        return f"{value * self.scale:,.{self.digits}f}"


@dataclass(frozen=True)
class Experiment:
    """`setting`: whose default the conclusion speaks of (docs/guide/settings.md). `note`: what to know of the table.

    `measure` asks a running `Engine` (None for a point without one) and returns the point's rows, without model and
    values, which `runner` adds.
    `conclusion` is a few short sentences, computed from all rows.
    """

    name: str
    title: str
    question: str
    setting: str
    columns: tuple[Column, ...]
    points: Callable[[Sizes], list[Point]]
    measure: Callable[[Point, Any], list[Row]]
    plot: Callable[[Sequence[Row], Figure], None]
    conclusion: Callable[[Sequence[Row]], str]
    note: str = ""
    shown: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    """Which rows stand in the report; the CSV has all."""


def spread(key: str, values: Sequence[float]) -> Row:
    """Median, least and most under `key`, `key_min` and `key_max`."""
    return {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each model, in the order of the rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return found


def largest_model(rows: Sequence[Row]) -> list[Row]:
    """The rows of the model that comes last: models are in order of size."""
    return list(by_model(rows).values())[-1]


def sampled(key: str, most: int) -> Callable[[Sequence[Row]], list[Row]]:
    """For `Experiment.shown`: of each model the rows of at most `most` values of `key`, evenly spread, both ends in."""

    def shown(rows: Sequence[Row]) -> list[Row]:
        chosen = []
        for own in by_model(rows).values():
            values = list(dict.fromkeys(row[key] for row in own))
            places = min(most, len(values))
            kept = {values[round(place * (len(values) - 1) / max(1, places - 1))] for place in range(places)}
            chosen += [row for row in own if row[key] in kept]
        return chosen

    return shown


def bullets(lines: Sequence[str]) -> str:
    """A Markdown list, to go after a sentence."""
    return "\n\n" + "\n".join(f"- {line}" for line in lines)


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
