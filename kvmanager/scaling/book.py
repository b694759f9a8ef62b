"""What was decided last of the number of replicas, as people are told of it. One thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any

OLD_S = 20.0
"""Age at which the policy's last report is dropped. It reports every `deployments.scaling.policy.SAY_EVERY_S`, unless
Serve's controller is gone, or decides nothing."""


class ScalingBook:
    """Times are seconds on any clock that does not jump."""

    def __init__(self) -> None:
        self._heard_at = -inf
        self._desired = self._target = self._running = 0
        self._why = ""
        self._demands: Mapping[str, float] = {}
        self._changes: Counter[tuple[str, str]] = Counter()

    def hear(self, now: float, desired: int, target: int, running: int, why: str, demands: Mapping[str, float]) -> None:
        """Note the numbers of replicas: that the policy desires, that Serve aims at after its delays, and that run."""
        if self._target and target != self._target:
            self._changes["up" if target > self._target else "down", self._why] += 1
        self._heard_at, self._desired, self._target, self._running = now, desired, target, running
        self._why, self._demands = why, dict(demands)

    def report(self, now: float) -> dict[str, Any]:
        """For `stats` and /health; empty before anything was said, and when the last word is old."""
        if now - self._heard_at > OLD_S:
            return {}
        changes = [(direction, why, count) for (direction, why), count in self._changes.items()]
        return {
            "desired": self._desired,
            "target": self._target,
            "running": self._running,
            "why": self._why,
            "demands": dict(self._demands),
            "changes": changes,
        }
