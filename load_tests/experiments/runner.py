"""Measures points, engine by engine: those that need the same engine follow each other, so that it starts once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import psutil

from load_tests.experiments.engine_specs import EngineSpec
from load_tests.experiments.experiment import Engine, Experiment, Point
from load_tests.harness.engine_process import EngineError
from load_tests.measuring.journal import Journal
from load_tests.measuring.processes import busy_s


class OpenEngine(Engine, Protocol):
    """See `engine_process.EngineProcess`."""

    def cpu_s(self) -> float:
        """Processor time so far."""
        ...

    def close(self, at_once: bool = False) -> None:
        """End it."""
        ...


def in_engine_order(points: Sequence[Point]) -> list[Point]:
    """By engine, engines in the order in which they come; on each what must be first is first."""
    engines = list(dict.fromkeys(point.engine for point in points))
    models = list(dict.fromkeys(point.model for point in points if point.engine is not None))

    def place(point: Point) -> tuple[int, int, bool]:
        model = models.index(point.model) if point.engine is not None else -1
        return model, engines.index(point.engine), not point.first

    return sorted(points, key=place)


def run_points(
    points: Sequence[Point],
    experiments: Mapping[str, Experiment],
    journal: Journal[Point],
    open_engine: Callable[[EngineSpec], OpenEngine],
    on_point: Callable[[Point, bool], None],
) -> list[str]:
    """Measure all that the journal has not; returns a sentence for each that failed.

    `on_point` is told before a point (False) and after it (True). A failed engine is started again for the next point,
    but one that does not start is not tried twice.
    """
    failures: list[str] = []
    with _Engines(open_engine) as engines:
        for point in in_engine_order(journal.missing(points)):
            on_point(point, False)
            try:
                engine = engines.get(point.engine)
                journal.add(point, **_measured(point, experiments[point.experiment], engine))
            except EngineError as error:
                failures.append(f"{point.experiment} of {point.model} was not measured: {error}")
                engines.drop()
            on_point(point, True)
    return failures


def _measured(point: Point, experiment: Experiment, engine: OpenEngine | None) -> dict[str, Any]:
    """What the journal keeps: see `report.Result.entries`."""
    clock, busy, own = time.monotonic(), busy_s(), _own_s(engine)
    found = experiment.measure(point, engine)
    seconds = max(1e-9, time.monotonic() - clock)
    others = max(0.0, (busy_s() - busy - (_own_s(engine) - own)) / seconds)
    named = {"model": point.model, **({"dtype": point.engine.dtype} if point.engine else {}), **point.values}
    return {
        "rows": [named | row for row in found],
        "others_cores": None if engine is None else round(others, 2),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _own_s(engine: OpenEngine | None) -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system) + (engine.cpu_s() if engine is not None else 0.0)


class _Engines(contextlib.AbstractContextManager["_Engines"]):
    """At most one engine at a time."""

    def __init__(self, open_engine: Callable[[EngineSpec], OpenEngine]) -> None:
        self._open = open_engine
        self._spec: EngineSpec | None = None
        self._engine: OpenEngine | None = None
        self._refused: dict[EngineSpec, str] = {}

    def get(self, spec: EngineSpec | None) -> OpenEngine | None:
        """The engine of this specification; another one is ended before. Raises EngineError."""
        if spec is None:
            return None
        if self._engine is None or spec != self._spec:
            self.drop()
            if spec in self._refused:
                raise EngineError(self._refused[spec])
            try:
                self._engine, self._spec = self._open(spec), spec
            except EngineError as error:
                self._refused[spec] = str(error)
                raise
        return self._engine

    def drop(self, at_once: bool = False) -> None:
        """End the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close(at_once)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.drop(at_once=kind is not None)
