"""Arms side by side: their ratios to a base arm, and what a ratio should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.measuring.interval import Interval, paired_interval
from load_tests.measuring.spread import Spread, ratios


@dataclass(frozen=True)
class Bound:
    """A bound on a median ratio: from above, or from below."""

    value: float
    at_most: bool = True

    def holds(self, ratio: float) -> bool:
        """Whether a ratio lies on the right side."""
        return ratio <= self.value if self.at_most else ratio >= self.value

    @property
    def in_words(self) -> str:
        """Such as `at most 1.05`."""
        return f"{'at most' if self.at_most else 'at least'} {self.value:g}"

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.value:g}"


@dataclass(frozen=True)
class Comparison:
    """Values by arm and round, the arm that the others are divided by, and the bound that `judged` arms should keep."""

    title: str
    unit: str
    base: str
    values: Mapping[str, Sequence[float]]
    judged: tuple[str, ...] = ()
    bound: Bound | None = None

    def spread(self, arm: str) -> Spread:
        """Of the arm's own values."""
        return Spread.of(self.values[arm])

    def ratio(self, arm: str) -> Spread:
        """To the base arm of the same round."""
        return Spread.of(ratios(self.values[arm], self.values[self.base]))

    def interval(self, arm: str) -> Interval:
        """Of the median ratio to the base arm, over the rounds."""
        return paired_interval(self.values[arm], self.values[self.base])

    def misses(self) -> list[str]:
        """A sentence for each judged arm beyond the bound."""
        if self.bound is None:
            return []
        medians = {arm: self.ratio(arm).median for arm in self.judged}
        return [
            f"Missed: {self.title}, {arm}: {median:.3f} of {self.base}; the target is {self.bound.in_words}."
            for arm, median in medians.items()
            if not self.bound.holds(median)
        ]

    def lines(self, form: str = ".4g", ratio_form: str = ".3f") -> list[list[str]]:
        """Rows of a table: title, arm, what was measured, ratio, its interval, target."""
        return [
            [
                self.title,
                arm,
                f"{self.spread(arm).slashed(form)} {self.unit}",
                "1" if arm == self.base else self.ratio(arm).slashed(ratio_form, bold=True),
                "" if arm == self.base else str(self.interval(arm)),
                str(self.bound) if arm in self.judged else "",
            ]
            for arm in self.values
        ]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        bound = self.bound and {"arms": self.judged, "bound": self.bound.value, "at_most": self.bound.at_most}
        return {
            "title": self.title,
            "unit": self.unit,
            "base": self.base,
            "target": bound,
            "values": dict(self.values),
            "ratios": {arm: self.ratio(arm).as_list() for arm in self.values},
            "intervals": {arm: asdict(self.interval(arm)) for arm in self.values if arm != self.base},
            "misses": self.misses(),
        }


COLUMNS = ("question", "arm", "measured", "ratio", "95 %", "target")
"""Of `Comparison.lines`."""
