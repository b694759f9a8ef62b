"""Whether something grows: the slope of a line through readings, with an interval.

Readings that follow each other resemble each other, so an interval from single ones would be far too narrow. They are
put into `BLOCKS` blocks of equal length; the line goes through the blocks' least readings, and the interval is
Student's for its slope (ordinary least squares). The least reading is what a process keeps: between two trims of its
heap (`deployments.protocol.free_memory`) freed memory adds up, 30 MiB and more in a busy replica, and with the load.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
