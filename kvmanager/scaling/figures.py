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
