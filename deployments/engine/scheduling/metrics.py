"""Prometheus families of scheduling. Read from any thread, without a lock of the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.engine.scheduling.steps import steps_of


def scheduling_families(scheduler: Any) -> Iterator[Metric]:
    """Of an engine's scheduler; nothing of one that is vLLM's own and has no target."""
    steps, policy = steps_of(scheduler), getattr(scheduler, "policy_in_force", None)
    failures = (steps.failures if steps is not None else 0) + getattr(scheduler, "fallbacks", 0)
    if steps is not None:
        yield CounterMetricFamily(
            "crosskv_scheduler_fallbacks", "Decisions of a policy or a budget that failed: first come, first served.",
            value=failures,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "crosskv_step_budget_tokens", "Tokens that the last step might compute.", value=steps.budget_tokens
        )
    if policy is None:
        return
    preempted = CounterMetricFamily(
        "crosskv_preemptions", "Requests that lost their run slot, by whose wish.", labels=["policy", "why"]
    )
    for why in ("policy", "memory"):
        preempted.add_metric([policy.name, why], scheduler.preempted[why])
    yield preempted
    resumed = CounterMetricFamily(
        "crosskv_preempted_tokens", "Tokens of requests that came back from a preemption.", labels=["outcome"]
    )
    resumed.add_metric(["kept"], scheduler.kept_tokens)
    resumed.add_metric(["recomputed"], scheduler.recomputed_tokens)
    yield resumed
    waiting = GaugeMetricFamily(
        "crosskv_scheduler_waiting", "Requests that wait in the engine, by level of mlfq.", labels=["level"]
    )
    for level, count in sorted(scheduler.waiting_by_level().items()):
        waiting.add_metric([str(level)], count)
    yield waiting
