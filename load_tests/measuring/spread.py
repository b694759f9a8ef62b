"""What repeated measurements come to: least, median and most, and percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one value over its repeats. Least and most are the interval: repeats are too few for anything finer."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for no values."""
        return cls(min(values), statistics.median(values), max(values))

    @classmethod
    def of_known(cls, values: Iterable[float | None]) -> Spread | None:
        """Of those that are not None; None of none."""
        known = [value for value in values if value is not None]
        return cls.of(known) if known else None

    def as_list(self) -> list[float]:
        """Least, median, most: for JSON."""
        return [self.least, self.median, self.most]

    def as_row(self, key: str) -> dict[str, float]:
        """Median, least and most under `key`, `key_min` and `key_max`: for CSV."""
        return {key: self.median, f"{key}_min": self.least, f"{key}_max": self.most}

    def slashed(self, form: str = "", factor: float = 1.0, bold: bool = False) -> str:
        """`least / median / most`, each times `factor`; `form` is a format specification, default three digits."""
        least, median, most = (number(value * factor, form) for value in self.as_list())
        return f"{least} / **{median}** / {most}" if bold else f"{least} / {median} / {most}"

    def bracketed(self, form: str = "", factor: float = 1.0, to: str = " to ") -> str:
        """`median (least to most)`, as `slashed`."""
        least, median, most = (number(value * factor, form) for value in self.as_list())
        return f"{median} ({least}{to}{most})"


def number(value: float, form: str = "") -> str:
    """By a format specification, such as `.0f`; without one, three digits."""
    return format(value, form or (".0f" if abs(value) >= 100 else ".3g"))


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By round: the two arms of one round had the same machine. Raises ValueError where rounds are missing."""
    return [one / other for one, other in zip(mine, theirs, strict=True)]


def percentile(values: Sequence[float], percent: int) -> float:
    """Between the two nearest of the sorted values; `percent` from 1 to 99. Raises ValueError for no values."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
