"""A running server, as the tests of this folder see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class RunningServer:
    """`launcher` is `make serve`'s process, `model_folder` what it serves."""

    url: str
    port: int
    model_folder: Path
    launcher: psutil.Process

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels. Raises AssertionError when there is none."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"{name} {labels} is not in /metrics"
        return sum(values)

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
        """Poll until `condition` holds."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
            time.sleep(0.5)

    def wait_until_idle(self) -> None:
        """Until no request runs, no save is under way, and no lease is open."""
        self.wait_until(
            lambda: (
                self.metric("crosskv_index_leases") == 0
                and self.metric("crosskv_index_reservations") == 0
                and self.metric("vllm:num_requests_running") == 0
                and self.metric("crosskv_device_free_blocks") == self.metric("crosskv_device_blocks") - 2
            ),
            "all blocks, leases and reservations are given back",
        )

    def clear(self, *tiers: str) -> dict[str, Any]:
        """POST /api/v1/kv/clear."""
        answer: dict[str, Any] = httpx.post(f"{self.url}/api/v1/kv/clear", json={"tiers": tiers}, timeout=20).json()
        return answer
