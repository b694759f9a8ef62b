"""How many replicas there are to be, and why, as Prometheus families: nothing where their number is fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "crosskv_replicas_desired": "Replicas that the figures ask for, before Serve's delays.",
    "crosskv_replicas_target": "Replicas that Serve aims at.",
    "crosskv_replicas_running": "Replicas that Serve runs.",
}


def scaling_families(scaling: Mapping[str, Any]) -> Iterator[Metric]:
    """From the manager's `stats()["scaling"]` (`kvmanager.scaling.book`); what is missing is left out."""
    if not scaling:
        return
    for name, text in _GAUGES.items():
        if isinstance(value := scaling.get(name.rpartition("_")[2]), int):
            yield GaugeMetricFamily(name, text, value=value)
    asked = GaugeMetricFamily(
        "crosskv_replicas_demand", "Replicas that a figure asks for, not rounded; the largest counts.", labels=["by"]
    )
    for figure, replicas in (scaling.get("demands") or {}).items():
        asked.add_metric([str(figure)], float(replicas))
    yield asked
    changes = CounterMetricFamily(
        "crosskv_replicas_changed",
        "Times that Serve aimed at more or fewer replicas, and what asked for it.",
        labels=["direction", "why"],
    )
    for direction, why, count in scaling.get("changes") or ():
        changes.add_metric([str(direction), str(why)], count)
    yield changes
