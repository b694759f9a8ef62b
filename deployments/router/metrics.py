"""Prometheus metrics of a router's process.

A router lives inside a deployment handle, where only its own process can see it, and several handles may share one. So
its metrics are the process's, in prometheus-client's default registry; the ingress shows them (`app.metrics`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric

PREFIX = "crosskv_router_"


class RouterMetrics:
    """Counters that every router of the process adds to. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at = clock()
        self.index_events = Counter(
            f"{PREFIX}index_events", "Changes of placement that the router's mirror has applied.", registry=registry
        )
        self.resyncs = Counter(
            f"{PREFIX}resyncs",
            "Times that events were missing and the mirror asked for all.",
            registry=registry,
        )
        self.failed_polls = Counter(
            f"{PREFIX}failed_polls", "Times that the KV manager did not tell the mirror anything.", registry=registry
        )
        self.mirror_age = Gauge(
            f"{PREFIX}mirror_age_seconds",
            "Since the mirror last had all that the KV manager knew; while nothing changes, up to a poll's length.",
            registry=registry,
        )
        self.mirror_age.set_function(lambda: self._clock() - self._heard_at)
        self.moves = Counter(
            f"{PREFIX}moves", "Hot prefixes that the router asked the manager to bring to one more replica.",
            registry=registry,
        )  # fmt: skip
        self.lost_moves = Counter(
            f"{PREFIX}lost_moves", "Moves of hot prefixes that did not reach the manager.", registry=registry
        )
        self.credit = Gauge(
            f"{PREFIX}credit", "Share of the prefill that a reused token saves, by tier; measured.", ["tier"],
            registry=registry,
        )  # fmt: skip

    def mirror_is_whole(self) -> None:
        """The mirror knows all that the manager knew a moment ago."""
        self._heard_at = self._clock()


@functools.cache
def router_metrics() -> RouterMetrics:
    """The metrics of this process."""
    return RouterMetrics(REGISTRY)


def router_families() -> list[Metric]:
    """Metrics of the routers of this process."""
    router_metrics()
    return [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]
