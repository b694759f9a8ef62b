"""The samples of a server's /metrics, to be added up by name and label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True)
class Samples:
    """By name; counters' names end with `_total`, histograms' with `_sum`, `_count` and `_bucket`."""

    by_name: Mapping[str, tuple[Sample, ...]]

    @classmethod
    def parse(cls, text: str) -> Samples:
        """From Prometheus text. Raises ValueError for what is none."""
        found: dict[str, list[Sample]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name].append((sample.labels, sample.value))
        return cls({name: tuple(samples) for name, samples in found.items()})

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 where there are none."""
        return sum(value for has, value in self._of(name) if labels.items() <= has.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums by a label's values, in the order in which they stand."""
        sums: dict[str, float] = defaultdict(float)
        for has, value in self._of(name):
            if label in has:
                sums[has[label]] += value
        return dict(sums)

    def values(self, name: str) -> list[float]:
        """Every sample of a metric."""
        return [value for _, value in self._of(name)]

    def mean(self, histogram: str) -> float | None:
        """The mean of what a histogram has seen; None while that is nothing."""
        count = self.total(f"{histogram}_count")
        return self.total(f"{histogram}_sum") / count if count else None

    def _of(self, name: str) -> Iterable[Sample]:
        return self.by_name.get(name, ())
