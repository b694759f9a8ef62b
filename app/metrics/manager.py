"""The KV manager's figures as Prometheus families.

The figures come from several processes, of which one may be restarting or of another version: what is missing, or is no
number, is left out, and the rest is shown.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from deployments.segment_store.codec_meter import BUCKETS_S
from kvmanager.segments.format import RAW

COUNTER_TEXTS = {
    "plans": "Plans made for prompts.",
    "prompt_blocks": "Blocks of the prompts that were planned.",
    "device_blocks": "Blocks of prompts that were planned to be reused on the device.",
    "cpu_blocks": "Blocks of prompts that were planned to be loaded from a CPU tier.",
    "redis_blocks": "Blocks of prompts that were planned to be loaded from Redis.",
    "offered_segments": "Segments that replicas offered to the CPU tier.",
    "refused_colder": "Offered segments for which nothing colder could be evicted, or that exceed the budget.",
    "refused_unknown_parent": "Offered segments whose parent is not stored there, nor about to be.",
    "refused_other_cut": "Offered segments that are stored elsewhere in another cut.",
    "refused_twins": "Segments not indexed because too many begin with their first block.",
    "committed_segments": "Segments that a CPU tier has stored.",
    "refused_commits": "Commits that the manager did not expect or has no room for; the tier frees the bytes.",
    "evicted_segments": "Segments ordered evicted, for whatever reason.",
    "dropped_segments": "Segments that a tier has lost or given up by itself.",
    "expired_leases": "Leases whose replica did not give them back in time.",
    "expired_reservations": "Saves that did not end in time.",
    "demoted_segments": "Segments copied to Redis.",
    "refused_demotions": "Copies to Redis without room: nothing there was colder.",
    "dropped_demotions": "Copies to Redis that waited too long in a full queue.",
    "expired_demotions": "Copies to Redis that did not end in time.",
    "stray_segments": "Segments written to Redis by a copy that had ended; evicted there.",
    "relieved_segments": "Segments evicted from a CPU tier above its high-water mark, while Redis keeps them.",
    "renewed_segments": "Segments kept from expiring in Redis because they were used.",
    "restored_segments": "Segments that Redis lost, copied there once more.",
    "promoted_segments": "Segments copied from Redis to a CPU tier.",
    "refused_promotions": "Segments at Redis for which a CPU tier has no room, or lacks the parent.",
    "trimmed_segments": "Segments evicted because a quota had shrunk below what was held.",
}


_INDEX_GAUGES = {
    "nodes": "Segments that the index knows, ghosts included.",
    "ghosts": "Evicted segments whose use count is remembered.",
    "leases": "Plans whose segments must not be evicted now; 0 when nothing runs.",
    "reservations": "Saves under way; 0 when nothing runs.",
    "demotions": "Moves from the CPU tier to Redis under way.",
    "demotion_queue": "Segments that wait to be copied to Redis.",
    "pins": "Pinned prompts.",
    "pinned_bytes": "Bytes that pins keep from being evicted.",
    "pin_budget_bytes": "Bytes that pins may keep.",
}
_LOCATION_GAUGES = {
    "segments": "Segments in a tier.",
    "bytes": "Bytes in a tier, reservations included.",
    "reserved_bytes": "Bytes promised to saves under way.",
    "budget_bytes": "Bytes that a tier may hold.",
    "states": "Segments in a tier that hold a model's states.",
    "state_bytes": "Bytes in a tier of a model's states.",
}
# By node, of the CPU tier's pool of prefetch workers: key -> (metric, what it is).
_NODE_GAUGES = {
    "pulls_in_flight": ("pulls_in_flight", "Segments on their way from Redis to a node."),
    "workers": ("prefetch_workers", "Prefetch workers of a node."),
}
_NODE_COUNTERS = {
    "promoted": ("promoted_segments", "Segments that the CPU tier kept of what it fetched from Redis."),
    "demoted": ("demoted_segments", "Segments that the CPU tier wrote to Redis."),
    "pulled_bytes": ("prefetch_bytes", "Bytes of segments fetched from Redis, as they are in memory."),
    "late_pulls": ("prefetch_late_segments", "Segments asked of another worker because theirs was late."),
}
_REDIS_COUNTERS = {
    "unusable_segments": (
        "unusable",
        "Entries that the index refused: damaged, of another format, or stored under another secret.",
    ),
    "neighbours_gone": ("neighbours_gone", "Segments of other models that left Redis to make room."),
}
_REDIS_GAUGES = {
    "used_memory_bytes": "Memory that Redis uses.",
    "maxmemory_bytes": "Memory that Redis may use; 0: no limit of its own.",
    "neighbours": "Segments of other models in an embedded Redis, kept while there is room.",
}
_CIRCUIT = {"closed": 0, "half_open": 1, "open": 2}
_CIRCUIT_TEXT = "Circuit breaker in front of a tier, by node: 0 closed, 1 half-open, 2 open."
_CHUNKS_TEXT = "Tokens in chunks of blended prompts with two chunks or more, and those found stored."
_ENDED_TEXT = "Replicas that ended because their engine was `dead` (an exception, a lost process) or `hung`."
_HIT_RATE_TEXT = (
    "Of the tokens in chunks of blended prompts with two chunks or more, the share that was found stored. "
    "NaN: there was no such prompt."
)
_ENDS = ("dead", "hung")
_OTHER_TEXT = "Counted by a manager of another version."
_FAILURES_TEXT = "Segments that did not come from Redis, or not as they were stored; they were recomputed."


class _Stats:
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def families(self) -> Iterator[Metric]:
        for name, text in _INDEX_GAUGES.items():
            yield _gauge(f"index_{name}", text, [], [((), self._stats.get(name))])
        locations = _mappings(self._stats.get("locations"))
        for name, text in _LOCATION_GAUGES.items():
            found = [((place["tier"], place["holder"][:8]), place.get(name)) for place in locations]
            yield _gauge(f"tier_{name}", text, ["tier", "holder"], found)
        counters = dict(_mapping(self._stats.get("counters")))
        asked, found = counters.pop("chunk_tokens_asked", None), counters.pop("chunk_tokens_found", None)
        tokens = [(("asked",), asked), (("found",), found)]
        yield _counter("chunk_tokens", _CHUNKS_TEXT, ["outcome"], tokens)
        if isinstance(asked, int) and isinstance(found, int):
            rate = found / asked if asked else math.nan
            yield _gauge("blend_hit_rate", _HIT_RATE_TEXT, [], [((), rate)])
        for name, value in counters.items():
            yield _counter(f"manager_{name}", COUNTER_TEXTS.get(name, _OTHER_TEXT), [], [((), value)])
        tenants = [
            ((place["tier"], place["holder"][:8], tag), share.get("bytes"))
            for place in locations
            for tag, share in _mapping(place.get("tenants")).items()
        ]
        yield _gauge("tenant_bytes", "Bytes of a tenant with a quota.", ["tier", "holder", "tenant"], tenants)
        counts = self._stats.get("replicas_ended")
        known = dict.fromkeys(_ENDS, 0) if isinstance(counts, Mapping) else {}  # an alert needs the 0 before the first
        ended = [((why,), count) for why, count in {**known, **_mapping(counts)}.items()]
        yield _counter(
            "replicas_ended",
            _ENDED_TEXT,
            ["why"],
            ended,
        )
        yield from scaling_families(_mapping(self._stats.get("scaling")))
        yield from self._directives()
        yield from self._nodes()
        yield from self._redis()

    def _directives(self) -> Iterator[Metric]:
        directives = _mapping(self._stats.get("directives"))
        yield _gauge("directives_in_flight", "Directives under way.", [], [((), directives.get("in_flight"))])
        ended = [
            ((kind, outcome), count)
            for kind, outcomes in _mapping(directives.get("outcomes")).items()
            for outcome, count in _mapping(outcomes).items()
        ]
        yield _counter("directives_ended", "Directives for devices, by how they ended.", ["kind", "outcome"], ended)

    def _nodes(self) -> Iterator[Metric]:
        tiers = {node[:8]: _mapping(tier) for node, tier in _mapping(self._stats.get("cpu_tiers")).items()}
        for key, (name, text) in _NODE_GAUGES.items():
            yield _gauge(name, text, ["node"], [((node,), tier.get(key)) for node, tier in tiers.items()])
        for key, (name, text) in _NODE_COUNTERS.items():
            yield _counter(name, text, ["node"], [((node,), tier.get(key)) for node, tier in tiers.items()])
        yield _counter("pull_failures", _FAILURES_TEXT, ["reason", "node"], _by_key(tiers, "pull_failures"))
        loads = _by_key(tiers, "loads_by_workers")
        yield _counter("prefetch_loads", "Loads from Redis by the workers used.", ["workers", "node"], loads)
        states = [(("redis", node), _CIRCUIT.get(str(tier.get("redis_circuit")))) for node, tier in tiers.items()]
        yield _gauge("circuit_state", _CIRCUIT_TEXT, ["tier", "node"], states)
        opened = [(("redis", node), tier.get("redis_circuit_opened")) for node, tier in tiers.items()]
        yield _counter("circuit_opened", "Times that the circuit breaker opened.", ["tier", "node"], opened)
        yield from codec_families({node: tier.get("codecs") for node, tier in tiers.items()})

    def _redis(self) -> Iterator[Metric]:
        redis = self._stats.get("redis")
        if not isinstance(redis, Mapping):  # this server has no Redis tier
            return
        up = "error" not in redis and redis.get("state", "ok") == "ok"
        yield _gauge("redis_up", "1 while Redis is usable.", [], [((), int(up))])
        for name, text in _REDIS_GAUGES.items():
            yield _gauge(f"redis_{name}", text, [], [((), redis.get(name))])
        for name, (key, text) in _REDIS_COUNTERS.items():
            yield _counter(f"redis_{name}", text, [], [((), redis.get(key))])


def manager_families(stats: Mapping[str, Any]) -> list[Metric]:
    """From the manager actor's `stats` to metric families, names `crosskv_*`."""
    return list(_Stats(stats).families())


def _gauge(name: str, text: str, labels: list[str], samples: Iterable[tuple[tuple[str, ...], Any]]) -> Metric:
    return _filled(GaugeMetricFamily(f"crosskv_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: list[str], samples: Iterable[tuple[tuple[str, ...], Any]]) -> Metric:
    return _filled(CounterMetricFamily(f"crosskv_{name}", text, labels=labels), samples)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[tuple[tuple[str, ...], Any]]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in samples:
        if isinstance(value, int | float):
            family.add_metric(labels, value)
    return family


def _by_key(tiers: Mapping[str, Mapping[str, Any]], name: str) -> list[tuple[tuple[str, str], Any]]:
    return [
        ((str(key), node), value) for node, tier in tiers.items() for key, value in _mapping(tier.get(name)).items()
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [place for place in value or () if {"tier", "holder"} <= _mapping(place).keys()]


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


_LABELS = ["codec", "node"]
_BUCKET_ENDS = [*(f"{end:g}" for end in BUCKETS_S), "+Inf"]
_RATIO_TEXT = (
    "Bytes of segments in memory over their bytes in Redis, of all that a node has written; `raw` is 1. "
    "NaN: none was written with the codec."
)


def codec_families(nodes: Mapping[str, Any]) -> Iterator[Metric]:
    """The metric families, of what `nodes` report by codec. A node's report that is none is left out."""
    ratio = GaugeMetricFamily("crosskv_compression_ratio", _RATIO_TEXT, labels=_LABELS)
    encoding = HistogramMetricFamily(
        "crosskv_compression_duration_seconds", "Encoding a segment for Redis.", labels=_LABELS
    )
    decoding = HistogramMetricFamily(
        "crosskv_decompression_duration_seconds", "Decoding a segment from Redis.", labels=_LABELS
    )
    for node, codecs in nodes.items():
        for codec, counts in codecs.items() if isinstance(codecs, Mapping) else ():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
                labels = [str(codec), node]
                histograms = [_histogram(counts[what]) for what in ("encoding", "decoding")]
                ratio.add_metric(labels, _ratio(str(codec), counts["raw_bytes"], counts["coded_bytes"]))
                encoding.add_metric(labels, *histograms[0])
                decoding.add_metric(labels, *histograms[1])
    yield from (ratio, encoding, decoding)


def _ratio(codec: str, raw_bytes: int, coded_bytes: int) -> float:
    if codec == RAW:  # whether there is a segment yet or not
        return 1.0
    return raw_bytes / coded_bytes if coded_bytes else math.nan


def _histogram(durations: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum."""
    counts = map(float, accumulate(durations["buckets"]))
    return list(zip(_BUCKET_ENDS, counts, strict=True)), float(durations["total_s"])
