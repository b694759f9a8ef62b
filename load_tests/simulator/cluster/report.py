"""The books of one cluster replay, and the figures that are made of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from load_tests.simulator.cluster.replica import Job

WINDOW_S = 60.0


class ClusterBooks:
    """Counts while a replay runs. Loads are prefilled tokens, at the time when their prefill ended."""

    def __init__(self, names: Sequence[str], block_bytes: int) -> None:
        self.saved_blocks = 0
        self.demoted_blocks = 0
        self.moved_blocks = 0
        self.moves = 0
        self._block_bytes = block_bytes
        self._tokens = {"device": 0, "cpu": 0, "redis": 0, "recomputed": 0}
        self._ttft_s: list[float] = []
        self._computed = dict.fromkeys(names, 0)
        self._windows: defaultdict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(names, 0))
        self._worst_queue = 0
        self._last_s = 0.0

    def queued(self, waiting: int) -> None:
        """Note the queue of a replica, just after a request came."""
        self._worst_queue = max(self._worst_queue, waiting)

    def first_token(self, now: float, replica: str, job: Job) -> None:
        """Note a request whose prefill is done."""
        self._tokens["device"] += job.device_tokens
        self._tokens["cpu"] += job.cpu_tokens
        self._tokens["redis"] += job.redis_tokens
        self._tokens["recomputed"] += job.computed_tokens
        self._ttft_s.append(now - job.arrival_s)
        self._computed[replica] += job.computed_tokens
        self._windows[int(now // WINDOW_S)][replica] += job.computed_tokens
        self._last_s = now

    def report(self) -> dict[str, Any]:
        """Return the figures, plain numbers.

        ``hit_tokens`` are those of all tiers. ``load_cov``: standard deviation over mean, over the replicas, of the
        tokens computed; ``window_load_cov``: its mean over whole windows of 60 s.
        """
        hit_tokens = self._tokens["device"] + self._tokens["cpu"] + self._tokens["redis"]
        prompt_tokens = hit_tokens + self._tokens["recomputed"]
        kv_bytes = self._block_bytes
        ttft = sorted(self._ttft_s)
        loads = list(self._computed.values())
        windows = [
            coefficient_of_variation(list(window.values()))
            for number, window in self._windows.items()
            if (number + 1) * WINDOW_S <= self._last_s
        ]
        return {
            "requests": len(ttft),
            "duration_s": self._last_s,
            "prompt_tokens": prompt_tokens,
            "hit_tokens": hit_tokens,
            "hit_rate": hit_tokens / prompt_tokens,
            "hit_tokens_by_tier": {tier: self._tokens[tier] for tier in ("device", "cpu", "redis")},
            "recomputed_tokens": self._tokens["recomputed"],
            "ttft_s": {
                "mean": fmean(ttft),
                "p50": percentile(ttft, 0.5),
                "p90": percentile(ttft, 0.9),
                "p99": percentile(ttft, 0.99),
            },
            "load_tokens": loads,
            "load_cov": coefficient_of_variation(loads),
            "window_load_cov": fmean(windows) if windows else coefficient_of_variation(loads),
            "worst_queue": self._worst_queue,
            "moves": self.moves,
            "moved_bytes": self.moved_blocks * kv_bytes,
            "saved_bytes": self.saved_blocks * kv_bytes,
            "demoted_bytes": self.demoted_blocks * kv_bytes,
        }


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return the standard deviation (of the population) over the mean, 0 when all are 0."""
    mean = fmean(values)
    return pstdev(values) / mean if mean else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of ``ordered`` values that at least ``share`` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
