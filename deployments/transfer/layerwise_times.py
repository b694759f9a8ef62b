"""Times of layerwise loads, layer by layer: for /metrics and for GET /api/v1/layerwise/stats."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

_MS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)


@dataclass(slots=True)
class LayerTime:
    """Of one layer, over all layerwise loads: `load_ms` after the layer before it; `wait_ms` of the engine for it."""

    loads: int = 0
    load_ms: float = 0.0
    waits: int = 0
    wait_ms: float = 0.0


class LayerTimes:
    """Written by load threads and the engine's, read by anyone. `registry` has the histogram and is a collector's."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerTime() for _ in range(layers)]
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._latency = Histogram(
            "crosskv_layerwise_load_latency",
            "Time in milliseconds that a layer of a layerwise load took after the one before it.",
            buckets=_MS, registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def loaded(self, layers: range, seconds: float) -> None:
        """Note consecutive layers of a load that have been written, `seconds` after the ones before."""
        each_ms = 1000 * seconds / len(layers)
        with self._lock:
            for layer in layers:
                self.layers[layer].loads += 1
                self.layers[layer].load_ms += each_ms
                self._latency.observe(each_ms)

    def waited(self, layer: int, seconds: float) -> None:
        """The engine has waited for a layer, or found it there (0)."""
        with self._lock:
            self.layers[layer].waits += 1
            self.layers[layer].wait_ms += 1000 * seconds

    def collect(self) -> Iterable[Metric]:
        """The sums behind the means, by layer: of every layer, so that a rate begins at 0."""
        for name, text in (
            ("loads", "Layerwise loads that brought the layer."),
            ("load_ms", "Milliseconds that the layer took after the one before it, over all loads."),
            ("waits", "Engine steps that needed the layer of a layerwise load."),
            ("wait_ms", "Milliseconds that the engine has waited for the layer."),
        ):
            family = CounterMetricFamily(f"crosskv_layerwise_layer_{name}", text, labels=["layer"])
            for number, layer in enumerate(self.layers):
                family.add_metric([str(number)], getattr(layer, name))
            yield family
