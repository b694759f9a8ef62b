"""What a replica says of its load: a few numbers, which travel by name through Ray Serve's controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica's load. No field is negative; `kv_pressure` is at most 1."""

    queued_prefill_s: float
    """Seconds that the engine needs for the prompts that have no token yet, by the measured rate."""
    kv_pressure: float
    """Share of the device pool that running requests hold; what is only cached can be taken, and does not count."""
    ongoing: float
    """Requests that the replica has taken and not ended."""
    waiting: float
    """Of these, those without a token yet. For people: they are in `queued_prefill_s` already."""

    def stats(self) -> dict[str, float]:
        """As Serve's `record_autoscaling_stats` wants it."""
        return {name: float(value) for name, value in asdict(self).items()}


NAMES = tuple(field.name for field in fields(ReplicaLoad))


def replica_load(stats: Mapping[str, float]) -> ReplicaLoad | None:
    """A replica's load from its numbers by name; None where one of them is missing, or is none that can be."""
    values = [stats.get(name, -1.0) for name in NAMES]
    if not all(isfinite(value) and value >= 0.0 for value in values):
        return None
    queued_prefill_s, kv_pressure, ongoing, waiting = values
    return ReplicaLoad(queued_prefill_s, min(1.0, kv_pressure), ongoing, waiting)


HALF_LIFE_TOKENS = 16_384.0


class PrefillRate:
    """How long a replica's queued prompts take: tokens times seconds per token, of the prompts that were computed last.

    The manager's rates (`kvmanager.loading.load_rates`) tell tiers apart and lie in another process; here is one figure
    that is there at once. A sample counts by its tokens, and half as much after `HALF_LIFE_TOKENS` more. One thread.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Note that a prompt's `tokens` were computed in `seconds`. Impossible values are ignored."""
        if tokens <= 0 or not 0.0 < seconds < float("inf"):
            return
        fade = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds

    def seconds(self, tokens: int) -> float | None:
        """Return how long `tokens` take, 0 for none; None before anything was computed."""
        if tokens <= 0:
            return 0.0
        return tokens * self._seconds / self._tokens if self._tokens else None
