"""How many requests went without the sparse prefix that they were planned with, as a metric."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, Metric


def lost_family(requests: int) -> Metric:
    """The requests that were lost so since start."""
    text = "Requests that went without the sparse prefix of their plan."
    return CounterMetricFamily("crosskv_sparse_lost", text, value=requests)
