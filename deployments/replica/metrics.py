"""A replica's metrics: vLLM's own, from the process's default registry, and the transfer threads' counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.port.cluster_port import ClusterPort
from deployments.transfer.threads import KVTransfer

if TYPE_CHECKING:
    from deployments.engine.directive_runner import DirectiveRunner
    from deployments.transfer.layerwise_times import LayerTimes

_CIRCUIT_STATES = {"closed": 0, "half_open": 1, "open": 2}


class TransferCollector:
    """Reads the counters when Prometheus asks; the transfer threads pay nothing for it."""

    def __init__(self, replica: str, port: ClusterPort, transfer: KVTransfer, pool: Mapping[str, int]) -> None:
        self._replica = replica
        self._port = port
        self._transfer = transfer
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        """The metric families, labelled with the replica's rank."""
        counters = self._transfer.counters
        for name, text, value in (
            ("segments_loaded", "Segments written into the device pool.", counters.segments_loaded),
            ("segments_saved", "Segments sent to a tier.", counters.segments_saved),
            ("bytes_loaded", "Bytes of segments loaded.", counters.bytes_loaded),
            ("bytes_saved", "Bytes of segments sent to a tier.", counters.bytes_saved),
            ("loads_failed", "Loads of which a part had to be recomputed.", counters.loads_failed),
            ("loads_layerwise", "Loads that came layer by layer, under the computation.", counters.loads_layerwise),
            ("saves_dropped", "Segments not saved for lack of room or of an answer.", counters.saves_dropped),
        ):
            family = CounterMetricFamily(f"crosskv_{name}", text, labels=["replica"])
            family.add_metric([self._replica], value)
            yield family
        for name, value in self._pool.items():
            gauge = GaugeMetricFamily(f"crosskv_device_{name}", "KV blocks of the device pool.", labels=["replica"])
            gauge.add_metric([self._replica], value)
            yield gauge
        degraded = CounterMetricFamily(
            "crosskv_degradations",
            "Times that a part of the cache was gone, late or wrong.",
            labels=["replica", "kind"],
        )
        for kind, value in sorted(self._port.counters.items()):
            degraded.add_metric([self._replica, kind], value)
        yield degraded
        circuits = GaugeMetricFamily(
            "crosskv_circuit_state",
            "Circuit breakers: 0 closed, 1 half-open, 2 open. A part whose circuit is open is not asked.",
            labels=["replica", "tier", "node"],
        )
        for (tier, node), state in sorted(self._port.circuits().items()):
            circuits.add_metric([self._replica, tier, node[:8]], _CIRCUIT_STATES[state])
        yield circuits


class DirectiveCollector:
    """How directives ended at this replica, and the worst time that each kind took from the engine at once."""

    def __init__(self, replica: str, device: DirectiveRunner) -> None:
        self._replica = replica
        self._device = device

    def collect(self) -> Iterable[Metric]:
        """The metric families, labelled with the replica's rank."""
        ended = CounterMetricFamily(
            "crosskv_directives", "Directives of the KV manager, by how they ended.",
            labels=["replica", "kind", "outcome"],
        )  # fmt: skip
        for (kind, outcome), count in sorted(self._device.counters.items()):
            ended.add_metric([self._replica, kind, outcome], count)
        yield ended
        worst = GaugeMetricFamily(
            "crosskv_directive_worst_step_seconds", "Longest time that a directive took from the engine at once.",
            labels=["replica", "kind"],
        )  # fmt: skip
        for kind, seconds in sorted(self._device.times.worst.items()):
            worst.add_metric([self._replica, kind], seconds)
        yield worst


def replica_metrics_text(
    replica: str,
    port: ClusterPort | None = None,
    transfer: KVTransfer | None = None,
    pool: Mapping[str, int] | None = None,
    device: DirectiveRunner | None = None,
    layers: LayerTimes | None = None,
) -> str:
    """Prometheus text. vLLM labels its metrics by engine; all replicas would say 0, so a replica label is added."""
    text = generate_latest(REGISTRY).decode()
    lines = [
        line if line.startswith("#") else _with_replica(line, replica)
        for line in text.splitlines()
        if line.startswith(("vllm:", "# HELP vllm:", "# TYPE vllm:"))
    ]
    if port is not None and transfer is not None:
        registry = CollectorRegistry()
        registry.register(TransferCollector(replica, port, transfer, pool or {}))
        histograms = [port.waits.registry]
        if device is not None:
            registry.register(DirectiveCollector(replica, device))
            histograms.append(device.times.registry)
        if layers is not None:
            histograms.append(layers.registry)
        lines.append(generate_latest(registry).decode())
        waits = [line for each in histograms for line in generate_latest(each).decode().splitlines()]
        lines += [line if line.startswith("#") else _with_replica(line, replica) for line in waits]
    return "\n".join(lines) + "\n"


def _with_replica(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if not brace:
        name, _, value = sample.partition(" ")
        return f'{name}{{replica="{replica}"}} {value}'
    return f'{name}{{replica="{replica}",{rest}'
