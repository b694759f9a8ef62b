"""For how long directives hold up the engine: a histogram per kind, and the worst."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


class StepTimes:
    """On one event loop; `registry` and `worst` are for anyone to read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.worst: dict[str, float] = {}
        """Seconds, by kind of directive."""
        self._seconds = Histogram(
            "crosskv_directive_step_seconds", "Time that a directive takes from the engine between two of its steps.",
            ["kind"], buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip

    def observe(self, kind: str, seconds: float) -> None:
        """Note one slice of a directive."""
        self._seconds.labels(kind).observe(seconds)
        self.worst[kind] = max(seconds, self.worst.get(kind, 0.0))
