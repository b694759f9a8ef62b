"""How evenly requests were spread over the replicas: counts by replica, and their coefficient of variation.

crosskv says with every answer which replica gave it. For the others Serve counts requests by replica among Ray's
metrics, which a node's agent shows about ten seconds late.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from load_tests.harness.client import Measured
from load_tests.harness.server import local_http

METRIC = "ray_serve_deployment_request_counter_total"
SETTLE_S = 15.0
_POLL_S = 1.0


def by_usage(measured: Sequence[Measured]) -> dict[str, int]:
    """Requests by replica, from `usage.kv_cache.replica`."""
    return dict(Counter(one.kv_cache["replica"] for one in measured if one.kv_cache))


def by_metrics(text: str) -> dict[str, int]:
    """Chat requests by replica in Ray's metrics, of the deployments that hold engines (not of an ingress)."""
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            deployment = sample.labels.get("deployment", "")
            chat = "chat" in sample.labels.get("route", "")
            if sample.name == METRIC and chat and "Ingress" not in deployment:
                counts[sample.labels.get("replica", "")] += round(sample.value)
    return dict(counts)


def settled(port: int, at_least: int, deadline_s: float = SETTLE_S) -> dict[str, int] | None:
    """Return requests by replica once there are `at_least` in all; None where they are fewer at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            counts = by_metrics(local_http().get(f"http://127.0.0.1:{port}/metrics", timeout=5).text)
        except (httpx.HTTPError, ValueError):
            counts = {}
        if sum(counts.values()) >= at_least:
            return counts
        if time.monotonic() > end:
            return None
        time.sleep(_POLL_S)


def added(before: Mapping[str, int] | None, after: Mapping[str, int] | None, requests: int) -> dict[str, int] | None:
    """What came between two counts; None where it is not known, or is not `requests` in all."""
    if before is None or after is None:
        return None
    counts = {name: count - before.get(name, 0) for name, count in after.items()}
    return counts if sum(counts.values()) == requests else None


def variation(counts: Mapping[str, int] | None, replicas: int) -> float | None:
    """Standard deviation over mean of the replicas' counts; a replica without requests counts as zero."""
    if counts is None:
        return None
    values = [*counts.values(), *[0] * (replicas - len(counts))]
    mean = statistics.fmean(values) if values else 0.0
    return statistics.pstdev(values) / mean if mean else None
