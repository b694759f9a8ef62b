"""Waits of a replica for the manager and for each tier; they guide the choice of the deadlines in the settings."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class PortWaits:
    """Two histograms in a registry of their own. Safe from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.plan = Histogram(
            "crosskv_plan_seconds", "Waits for the KV manager's plan of a prompt.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.segment = Histogram(
            "crosskv_segment_wait_seconds", "Waits for the next segment of a load, come or not.", ["tier"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
