"""The KV manager's figures as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "nodes": "Segments that the index knows, ghosts included.",
    "ghosts": "Evicted segments whose use count is remembered.",
    "leases": "Plans whose segments must not be evicted now.",
    "reservations": "Saves under way.",
}
_LOCATION_GAUGES = {
    "segments": "Segments in a tier.",
    "bytes": "Bytes in a tier, reservations included.",
    "reserved_bytes": "Bytes promised to saves under way.",
    "budget_bytes": "Bytes that a tier may hold.",
}


class _StatsCollector:
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"crosskv_index_{name}", text, value=self._stats[name])
        for name, text in _LOCATION_GAUGES.items():
            family = GaugeMetricFamily(f"crosskv_tier_{name}", text, labels=["tier", "holder"])
            for location in self._stats["locations"]:
                family.add_metric([location["tier"], location["holder"][:8]], location[name])
            yield family
        for name, value in self._stats["counters"].items():
            yield CounterMetricFamily(f"crosskv_manager_{name}", "See kvmanager/counters.py.", value=value)


def manager_metrics_text(stats: Mapping[str, Any]) -> str:
    """From `KVManager.stats` to Prometheus text, names `crosskv_*`."""
    registry = CollectorRegistry()
    registry.register(_StatsCollector(stats))
    return generate_latest(registry).decode()
