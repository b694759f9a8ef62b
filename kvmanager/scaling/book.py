"""The number of replicas as /health shows it: what was decided last, and how many of them are missing. One thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Any

OLD_S = 20.0
"""Age at which the policy's last report is dropped. It reports every `deployments.scaling.policy.SAY_EVERY_S`, unless
Serve's controller is gone, or decides nothing."""
LAG_S = 10.0
"""How long a replica's start or removal may be seen in one place before it is known in all, where cores are short."""


class ScalingBook:
    """What was decided last. Times are seconds on any clock that does not jump."""

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


class WantedReplicas:
    """How many replicas there should be now, where their number changes by itself: those below it are missing.

    One that is still being started for more load is not missing, and one that is taken away is not either. One that was
    there and is gone is missing until it has been replaced, also where fewer would be enough. Fewer than the least
    allowed number are always too few. `least`: the least number allowed. Times are as in `ScalingBook`.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._reached = 0
        self._short_since: float | None = None

    def now(self, at: float, target: int | None, living: int, listed: int) -> int:
        """How many there should be.

        `target`: how many Serve aims at, None: it has not said lately; `living`: those that can be sent to; `listed`:
        those that Serve runs, as it said last, dead ones among them that it has not noticed yet.
        """
        aim = listed if target is None else target
        self._reached = min(aim, max(self._reached, living, listed))
        if living >= self._reached:
            self._short_since = None
            return self._least
        if self._short_since is None:
            self._short_since = at
        return max(self._least, self._reached) if at - self._short_since >= LAG_S else self._least
