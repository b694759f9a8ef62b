"""What an operator sees of a replica's transfers and directives."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from deployments.kv_transfer import TransferCounters
from deployments.replica_metrics import replica_metrics_text
from deployments.step_times import StepTimes


def test_directives_pins_and_their_time_are_shown_by_replica() -> None:
    times = StepTimes()
    for seconds in (0.0004, 0.003):
        times.observe("promote", seconds)
    device: Any = SimpleNamespace(
        counters=Counter({("promote", "done"): 2, ("evict", "refused_gone"): 1}), times=times, pins_gave_way=1
    )
    port: Any = SimpleNamespace(counters=Counter(), circuits=dict, waits=SimpleNamespace(registry=CollectorRegistry()))
    transfer: Any = SimpleNamespace(counters=TransferCounters())

    lines = replica_metrics_text("1", port, transfer, {"pinned_blocks": 12}, device).splitlines()

    for expected in (
        'crosskv_directives_total{kind="promote",outcome="done",replica="1"} 2.0',
        'crosskv_directives_total{kind="evict",outcome="refused_gone",replica="1"} 1.0',
        'crosskv_directive_worst_step_seconds{kind="promote",replica="1"} 0.003',
        'crosskv_directive_step_seconds_count{replica="1",kind="promote"} 2.0',
        'crosskv_pins_gave_way_total{replica="1"} 1.0',
        'crosskv_device_pinned_blocks{replica="1"} 12.0',
    ):
        assert expected in lines, "\n".join(line for line in lines if line.startswith("crosskv_"))
