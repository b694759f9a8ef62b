"""Counts and times of blends, for /metrics. Written by the engine thread, read by anyone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.engine.load_paths.blending.job import BlendParts

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
DONE = "done"
CANCELLED = "cancelled"
FAILED = "failed"
"""The blocks from there on were computed by vLLM."""
LATE = "late"
"""Given up before its turn: the blends before it waited too long for bytes that did not come."""


class BlendCounters:
    """See the module's docstring. `registry` has it all."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.outcomes: Counter[str] = Counter()
        """Number of planned blends by outcome: `done`, `cancelled`, `failed`, `late`, or `refused_` and why."""
        self.rows: Counter[str] = Counter()
        self.available = False
        self.last: BlendParts | None = None
        """Of the last blend that ended well."""
        self._seconds = Histogram(
            "crosskv_blend_seconds",
            "Time that a blend took, from its turn to its end.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def done(self, seconds: float, parts: BlendParts) -> None:
        """A blend has ended well."""
        self.outcomes[DONE] += 1
        self._seconds.observe(seconds)
        self.last = parts
        for kind, rows in (
            ("reused", parts.reused - parts.selected), ("selected", parts.selected), ("uncached", parts.uncached),
        ):  # fmt: skip
            self.rows[kind] += rows

    def refused(self, why: str) -> None:
        """A planned blend is not made."""
        self.outcomes[f"refused_{why}"] += 1

    def collect(self) -> Iterable[Metric]:
        """The counters."""
        text = "Whether the engine blends; 0: its log says at the start why not."
        yield GaugeMetricFamily("crosskv_blending_available", text, value=float(self.available))
        blends = CounterMetricFamily("crosskv_blends", "Planned blends by how they ended.", labels=["outcome"])
        for outcome, count in sorted(self.outcomes.items()):
            blends.add_metric([outcome], count)
        yield blends
        text = "Rows of blends that ended well: reused, selected to be recomputed, or uncached."
        rows = CounterMetricFamily("crosskv_blend_rows", text, labels=["kind"])
        for kind, count in sorted(self.rows.items()):
            rows.add_metric([kind], count)
        yield rows
