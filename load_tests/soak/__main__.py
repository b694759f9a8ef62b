"""`python -m load_tests.soak --port 8000`: which process of a running server grows, while something else keeps it busy.

After a warm-up it reads each process's private memory (USS) every few seconds, and shows the line through the readings
with its interval. A process that was not there all the time has none. One grows that surely gains more than
`CARED_FOR`: among 20 processes some always seem to gain a few KiB a minute.

Readings that follow each other resemble each other, so an interval from single ones would be far too narrow. They are
put into `BLOCKS` blocks of equal length; the line goes through the blocks' least readings, and the interval is
Student's for its slope (ordinary least squares). The least reading is what a process keeps: between two trims of its
heap (`deployments.protocol.memory`) freed memory adds up, 30 MiB and more in a busy replica, and with the load.

Exit codes: 0 none grows, 1 one does, 2 there is no such server.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import psutil
import typer

from load_tests.harness.footprint import kind_of, launcher_of
from load_tests.measuring import report
from load_tests.measuring.program import EXIT_FELL_SHORT, JsonFile, one_sentence, out

MIB = 1024**2
MINUTE_S = 60.0
CARED_FOR = 1024**3 / (7 * 86_400)
"""Bytes a second: 1 GiB a week, or .1 MiB a minute. No server is missed for less between two updates of it."""
BLOCKS = 10
_STUDENT = 2.306
"""The 97.5 % quantile of Student's t distribution with `BLOCKS` - 2 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Of readings by time, per second: where it lies with a probability of 95 %."""

    low: float
    high: float

    def rises_by_more_than(self, least: float) -> bool:
        """Whether the whole interval is above `least`, per second; with 0, whether there is a growth at all."""
        return self.low > least


def slope(times_s: Sequence[float], readings: Sequence[float]) -> Slope:
    """Return the slope of `readings`, taken at `times_s` in order. Raises ValueError for less than two a block."""
    count = len(readings) // BLOCKS
    if count < 2 or len(times_s) != len(readings):
        raise ValueError(f"a slope needs {2 * BLOCKS} readings or more, each with its time; there are {len(readings)}")
    first = len(readings) - count * BLOCKS
    starts = range(first, len(readings), count)
    xs = [statistics.median(times_s[start : start + count]) for start in starts]
    ys = [min(readings[start : start + count]) for start in starts]
    steep, height = statistics.linear_regression(xs, ys)
    residue = sum((y - height - steep * x) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    reach = _STUDENT * math.sqrt(residue / (BLOCKS - 2) / spread)
    return Slope(steep - reach, steep + reach)


@dataclass
class Watched:
    """A process: its kind, and its private memory at each reading."""

    pid: int
    kind: str
    uss_bytes: list[int] = field(default_factory=list)


def read(top: psutil.Process, watched: dict[int, Watched]) -> None:
    """Add a reading of each process of the tree."""
    for process in (top, *top.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            uss = int(process.memory_full_info().uss)
            found = watched.setdefault(process.pid, Watched(process.pid, kind_of(" ".join(process.cmdline()))))
            found.uss_bytes.append(uss)


def growth(times_s: Sequence[float], watched: Mapping[int, Watched]) -> list[tuple[Watched, Slope]]:
    """The slope of each process that was there at every reading, in bytes a second, the steepest first."""
    whole = [one for one in watched.values() if len(one.uss_bytes) == len(times_s)]
    return sorted(((one, slope(times_s, one.uss_bytes)) for one in whole), key=lambda found: -found[1].low)


def grows(line: Slope) -> bool:
    """Whether a process with this slope, in bytes a second, gains what its owner would care for."""
    return line.rises_by_more_than(CARED_FOR)


def table(found: Sequence[tuple[Watched, Slope]]) -> str:
    """Markdown: a line for each process."""

    def a_minute(nbytes_a_second: float) -> str:
        return f"{nbytes_a_second * MINUTE_S / MIB:+.2f}"

    rows = [
        [
            one.kind,
            str(one.pid),
            f"{one.uss_bytes[-1] / MIB:.0f}",
            f"{a_minute(line.low)} to {a_minute(line.high)}",
            "yes" if grows(line) else "no",
        ]
        for one, line in found
    ]
    return report.table(["process", "number", "private, MiB", "slope, MiB a minute", "grows"], rows)


def main(
    port: int = 8000,
    warm_up_s: Annotated[float, typer.Option(min=0)] = 600.0,
    duration_s: Annotated[float, typer.Option(min=1)] = 1800.0,
    every_s: Annotated[float, typer.Option(min=0.1)] = 5.0,
    json_file: JsonFile = None,
) -> None:
    """Watch a server that is kept busy."""
    with one_sentence(LookupError, ValueError):
        top, watched, times = launcher_of(port), dict[int, Watched](), list[float]()
        out.print(f"warming up for {warm_up_s:.0f} s, then reading for {duration_s:.0f} s")
        time.sleep(warm_up_s)
        began = time.monotonic()
        while (now := time.monotonic() - began) < duration_s:
            read(top, watched)
            times.append(now)
            time.sleep(every_s)
        found = growth(times, watched)
    rows = [{"kind": one.kind, "pid": one.pid, "low": line.low, "high": line.high} for one, line in found]
    report.deliver(table(found), rows, json_file)
    raise typer.Exit(EXIT_FELL_SHORT if any(grows(line) for _, line in found) else 0)


if __name__ == "__main__":
    typer.run(main)
