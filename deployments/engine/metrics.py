"""Prometheus families of an engine: vLLM's own, transfers, directives, the device pool, layers.

Read on request, from any thread: no lock of the engine's, and the transfer threads pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from deployments.engine.directive_runner import DirectiveRunner
    from deployments.port.cluster_port import ClusterPort
    from deployments.transfer.threads import TransferCounters

POOL_TEXTS = {
    "blocks": "KV blocks of the device pool, one of vLLM's own among them.",
    "free_blocks": "KV blocks that no request holds; what they cache may be found again.",
    "cached_blocks": "KV blocks that a prompt could find.",
    "wanted_blocks": "KV blocks that the requests at the head of the engine's queue wait for; 0: they fit.",
}
_CIRCUIT_STATES = {"closed": 0, "half_open": 1, "open": 2}


def vllm_families() -> Iterator[Metric]:
    """vLLM's own, from the process's default registry."""
    return (family for family in REGISTRY.collect() if family.name.startswith("vllm:"))


def vllm_pressure() -> float | None:
    """Share of the KV blocks that requests hold, as vLLM has counted it in its last step; None: it does not count."""
    values = [
        sample.value
        for family in vllm_families()
        if family.name == "vllm:kv_cache_usage_perc"
        for sample in family.samples
    ]
    return max(values, default=None)


def sharing_family(shares: bool) -> Metric:
    """Whether there is any sharing. `/health` says why not, where the configuration tells."""
    text = "Whether the replica shares KV; 0: it keeps vLLM's own prefix cache only."
    return GaugeMetricFamily("crosskv_shares_kv", text, value=float(shares))


def transfer_families(counters: TransferCounters, pool: Mapping[str, int]) -> Iterator[Metric]:
    """What was loaded and saved, and how many blocks of the device pool are what."""
    for name, text, value in (
        ("segments_loaded", "Segments written into the device pool.", counters.segments_loaded),
        ("segments_saved", "Segments sent to a tier.", counters.segments_saved),
        ("bytes_loaded", "Bytes of segments loaded.", counters.bytes_loaded),
        ("bytes_saved", "Bytes of segments sent to a tier.", counters.bytes_saved),
        ("loads_failed", "Loads of which a part had to be recomputed.", counters.loads_failed),
        ("loads_layerwise", "Loads that came layer by layer, under the computation.", counters.loads_layerwise),
        ("loads_shared", "Requests that found what another request's load had brought.", counters.loads_shared),
        ("saves_short", "Sequences not saved because no load of them would be worth it.", counters.saves_short),
        ("saves_dropped", "Segments not saved for lack of room or of an answer.", counters.saves_dropped),
    ):
        yield CounterMetricFamily(f"crosskv_{name}", text, value=value)
    for name, value in pool.items():
        yield GaugeMetricFamily(f"crosskv_device_{name}", POOL_TEXTS[name], value=value)


def given_up_family(counts: Mapping[str, int]) -> Metric:
    """How often what is held of requests until it may be saved was given up, by reason."""
    family = CounterMetricFamily(
        "crosskv_held_given_up",
        "Requests whose held windows or states went unsaved: `preempted`, beyond a `share` of the pool, or for `room`.",
        labels=["reason"],
    )
    for reason, count in counts.items():
        family.add_metric([str(reason)], count)
    return family


def port_families(port: ClusterPort) -> Iterable[Metric]:
    """What of the cluster was gone, late or wrong, and how long it was waited for."""
    degraded = CounterMetricFamily(
        "crosskv_degradations",
        "Times that a part of the cache was gone, late or wrong; each kind is logged once.",
        labels=["kind"],
    )
    for kind, value in sorted(port.counters.items()):
        degraded.add_metric([kind], value)
    yield degraded
    circuits = GaugeMetricFamily(
        "crosskv_circuit_state",
        "Circuit breakers: 0 closed, 1 half-open, 2 open. A part whose circuit is open is not asked.",
        labels=["tier", "node"],
    )
    for (tier, node), state in sorted(port.circuits().items()):
        circuits.add_metric([tier, node[:8]], _CIRCUIT_STATES[state])
    yield circuits
    yield from port.waits.registry.collect()


def directive_families(directives: DirectiveRunner) -> Iterable[Metric]:
    """How directives ended, and what they took from the engine at once."""
    ended = CounterMetricFamily(
        "crosskv_directives", "Directives of the KV manager, by how they ended.", labels=["kind", "outcome"]
    )
    for (kind, outcome), count in sorted(directives.counters.items()):
        ended.add_metric([kind, outcome], count)
    yield ended
    worst = GaugeMetricFamily(
        "crosskv_directive_worst_step_seconds", "Longest time that a directive took from the engine at once.",
        labels=["kind"],
    )  # fmt: skip
    for kind, seconds in sorted(directives.times.worst.items()):
        worst.add_metric([kind], seconds)
    yield worst
    yield from directives.times.registry.collect()
