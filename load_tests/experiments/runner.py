"""Measures points, engine by engine: those that need the same engine follow each other, so that it starts once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import psutil

from load_tests.experiments.experiment import Experiment, Point
from load_tests.experiments.sizes import EngineSpec
from load_tests.harness.engine_process import EngineError, EngineProcess
from load_tests.measuring.journal import Journal
from load_tests.measuring.processes import busy_s


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
    open_engine: Callable[[EngineSpec], EngineProcess],
    on_point: Callable[[Point, bool], None],
) -> list[str]:
    """Measure all that the journal has not; returns a sentence for each that failed.

    At most one engine runs at a time. `on_point` is told before a point (False) and after it (True). A failed engine is
    started again for the next point, but one that does not start is not tried twice.
    """
    failures: list[str] = []
    for spec, group in groupby(in_engine_order(journal.missing(points)), key=lambda point: point.engine):
        engine: EngineProcess | None = None
        refusal = ""
        try:
            for point in group:
                on_point(point, False)
                try:
                    if refusal:
                        raise EngineError(refusal)
                    if spec is not None and engine is None:
                        try:
                            engine = open_engine(spec)
                        except EngineError as error:
                            refusal = str(error)
                            raise
                    journal.add(point, **_measured(point, experiments[point.experiment], engine))
                except EngineError as error:
                    failures.append(f"{point.experiment} of {point.model} was not measured: {error}")
                    _ended(engine)
                    engine = None
                on_point(point, True)
        except BaseException:
            _ended(engine, at_once=True)
            raise
        _ended(engine)
    return failures


def _measured(point: Point, experiment: Experiment, engine: EngineProcess | None) -> dict[str, Any]:
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


def _own_s(engine: EngineProcess | None) -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system) + (engine.cpu_s() if engine is not None else 0.0)


def _ended(engine: EngineProcess | None, at_once: bool = False) -> None:
    if engine is not None:
        engine.close(at_once)
