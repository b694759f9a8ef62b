"""Every metric of the project's own, as the code makes it: what docs/guide/metrics.md is written from.

Each part's families are made here as that part makes them, of figures that stand for nothing. So a name, a text or a
label that changes there changes here. What rules and dashboards name is checked against this list, and this list
against a running server (tests/end_to_end/metrics).

Leans on prometheus-client 0.26: `_labelnames` of its metrics and families, and a registry's `_collector_to_names`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

LABELS = {
    "by": "the three figures that ask for replicas: `queued_prefill`, `kv_pressure`, `ongoing`",
    "cause": "words of this version",
    "codec": "codecs that this version knows",
    "direction": "`up`, `down`",
    "holder": "the first eight digits of a node's or a replica's name, of those that live; `redis`",
    "kind": "words of this version",
    "layer": "the model's layers, by number",
    "level": "levels of `mlfq`",
    "node": "the first eight digits of a node's name, of those that live; empty where it is no node's",
    "outcome": "words of this version",
    "path": "the server's own paths; all others are `other`",
    "policy": "scheduling policies",
    "reason": "words of this version",
    "replica": "replicas' numbers, from 0",
    "source": "`device`, `cpu`, `redis`, `recomputed`",
    "stage": "the stages of [where the time goes](troubleshooting.md#where-the-time-goes)",
    "status": "HTTP statuses that the server answers; `499`: the client went away",
    "tenant": "tags of the tenants that have a key; never who a request says it is for",
    "tier": "`device`, `cpu`, `redis`; of circuits also `manager`, `saves`",
    "why": "words of this version",
    "workers": "numbers up to `kv.prefetch_workers`",
}
"""What bounds each label's values. A label that is not here is a time series for each value that a client sends."""


@dataclass(frozen=True)
class Described:
    """One metric. `name` is what `/metrics` names its samples by; a histogram's have endings (`samples`)."""

    name: str
    part: str
    type: str
    labels: frozenset[str]
    text: str

    @property
    def samples(self) -> tuple[str, ...]:
        """The names that a query may use."""
        return tuple(f"{self.name}{end}" for end in ("_bucket", "_sum", "_count")) if self._is_wide else (self.name,)

    @property
    def _is_wide(self) -> bool:
        return self.type == "histogram"


def catalogue() -> list[Described]:
    """All of them, by part, then by name. A name that two parts have is described by the first, with both's labels."""
    found: dict[str, Described] = {}
    for part, families, labels in _parts():
        for family in families:
            one = _described(part, family, labels)
            before = found.get(one.name)
            found[one.name] = one if before is None else replace(before, labels=before.labels | one.labels)
    return list(found.values())


def _described(part: str, family: Any, more_labels: frozenset[str]) -> Described:
    """Of a `Metric` with its labels' names, or of one of prometheus-client's own metrics."""
    name = family.name if hasattr(family, "name") else family._name
    kind = family.type if hasattr(family, "type") else family._type
    text = family.documentation if hasattr(family, "documentation") else family._documentation
    labels = frozenset(family._labelnames) | more_labels
    return Described(f"{name}_total" if kind == "counter" else name, part, kind, labels, text)


def _parts() -> Iterator[tuple[str, Iterable[Any], frozenset[str]]]:
    from app.metrics.ingress import IngressMetrics
    from app.metrics.manager import manager_families
    from deployments.router.metrics import RouterMetrics

    ingress, router = CollectorRegistry(), CollectorRegistry()
    metrics = IngressMetrics(ingress)
    metrics.show_queue(int, int)
    metrics.show_replicas(0)
    metrics.show_chunks_waiting(int)
    metrics.show_answers(int, int, int)
    RouterMetrics(router)
    yield "Requests", _collectors(ingress), frozenset()
    yield "Routing", _collectors(router), frozenset()
    yield "Replicas", _of_a_replica(), frozenset({"replica"})
    yield "The manager and the tiers", manager_families(_manager_stats()), frozenset()


def _of_a_replica() -> Iterator[Any]:
    from deployments.engine.directive_runner import StepTimes
    from deployments.engine.load_paths.blending.counters import BlendCounters
    from deployments.engine.load_paths.preempted import brought_ahead_family
    from deployments.engine.load_paths.sparse.path import lost_family
    from deployments.engine.metrics import (
        POOL_TEXTS,
        directive_families,
        given_up_family,
        port_families,
        sharing_family,
        transfer_families,
    )
    from deployments.engine.scheduling.metrics import scheduling_families
    from deployments.port.calls import PortWaits
    from deployments.transfer.jobs import TransferCounters
    from deployments.transfer.layerwise_times import LayerTimes

    waits, steps = PortWaits(), StepTimes()
    port = SimpleNamespace(counters={}, circuits=dict, waits=SimpleNamespace(registry=CollectorRegistry()))
    directives = SimpleNamespace(counters={}, times=SimpleNamespace(worst={}, registry=CollectorRegistry()))
    scheduler = SimpleNamespace(
        crosskv_steps=SimpleNamespace(failures=0, budget_tokens=0),
        policy_in_force=SimpleNamespace(name=""),
        preempted=Counter(),
        kept_tokens=0,
        recomputed_tokens=0,
        waiting_by_level=dict,
    )
    yield from transfer_families(TransferCounters(), dict.fromkeys(POOL_TEXTS, 0))
    yield from port_families(cast(Any, port))
    yield from _collectors(waits.registry)
    yield from directive_families(cast(Any, directives))
    yield from _collectors(steps.registry)
    yield from _collectors(LayerTimes(1).registry)
    yield from _collectors(BlendCounters().registry)
    yield from scheduling_families(scheduler)
    yield brought_ahead_family(0)
    yield lost_family(0)
    yield given_up_family({})
    yield sharing_family(True)


def _collectors(registry: CollectorRegistry) -> Iterator[Any]:
    """What is registered: metrics as they are, and the families of what collects them by itself."""
    for collector in registry._collector_to_names:
        if hasattr(collector, "_labelnames"):
            yield collector
        else:
            yield from collector.collect()


def _manager_stats() -> Mapping[str, Any]:
    """As `KVManagerActor.stats` has them: what decides which families there are."""
    from kvmanager.config import ManagerConfig
    from kvmanager.manager import KVManager

    return {
        **KVManager(ManagerConfig(blocks_per_segment=1), epoch=1).stats(0.0),
        "redis": {},
        "scaling": {"desired": 0, "target": 0, "running": 0},
    }
