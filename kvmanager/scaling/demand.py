"""What replicas say of their load, and how many of them there should be by that.

Each of three figures asks for a number of replicas, and the largest number counts:

* `queued_prefill`: the prompts in front of the engines take `QUEUE_SHARE` of the wanted time to the first token;
* `kv_pressure`: running requests hold `POOL_SHARE` of the device pools;
* `ongoing`: requests take `SLOTS_SHARE` of the places in which engines compute.

More replicas are wanted as soon as a figure asks for more than are wanted now. One less is wanted when all three
fit into one less. Between the two lies the work of a whole replica, so the number does not swing. Replicas go one at
a time, for with each goes the KV on its device. What is not known changes nothing: not an old figure, nor a replica
that has not said any. Ray Serve adds the delays. Pure; O(replicas).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, isfinite

QUEUE_SHARE = 0.5
"""The prompt's own prefill needs the other half."""
POOL_SHARE = 0.8
"""Above it running requests are preempted, and nothing is cached."""
SLOTS_SHARE = 0.8
_ROUNDING = 1e-6
"""A mean of measured shares may lie this much above what it should be."""

UNKNOWN = "unknown"
"""Why nothing is decided: some replica's figures are missing or old."""
ENOUGH = "enough"
"""There are as many as are needed."""
FITS = "fits"
"""One less is enough."""
BOUNDS = "bounds"
"""There are fewer or more than there may be."""

HALF_LIFE_TOKENS = 16_384.0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica's load: a few numbers, which travel by name through Ray Serve's controller.

    No field is negative; `kv_pressure` is at most 1.
    """

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


@dataclass(frozen=True, slots=True)
class Limits:
    """What one replica may be loaded with: seconds to a first token, and requests computed at the same time."""

    ttft_target_s: float
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest number of replicas."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many replicas there should be, why, and how many each figure asks for (empty: unknown)."""

    replicas: int
    why: str
    demands: Mapping[str, float]


def demands(loads: Sequence[ReplicaLoad], limits: Limits) -> dict[str, float]:
    """How many replicas each figure asks for, not rounded."""
    return {
        "queued_prefill": sum(load.queued_prefill_s for load in loads) / (QUEUE_SHARE * limits.ttft_target_s),
        "kv_pressure": sum(load.kv_pressure for load in loads) / POOL_SHARE,
        "ongoing": sum(load.ongoing for load in loads) / (SLOTS_SHARE * limits.max_num_seqs),
    }


def decide(loads: Sequence[ReplicaLoad | None], wanted: int, bounds: Bounds, limits: Limits) -> ScalingDecision:
    """Return how many replicas there should be, given how many are `wanted` now and the `loads` of those that run.

    A load of None: the replica has not reported any.
    """
    bounded = min(max(wanted, bounds.least), bounds.most)
    known = [load for load in loads if load is not None]
    if not known or len(known) < len(loads):
        return ScalingDecision(bounded, UNKNOWN, {})
    asked = demands(known, limits)
    if bounded != wanted:
        return ScalingDecision(bounded, BOUNDS, asked)
    why = max(asked, key=lambda figure: asked[figure])
    needed = ceil(asked[why] - _ROUNDING)
    if needed > wanted:
        more = min(needed, bounds.most)
        return ScalingDecision(more, why if more > wanted else BOUNDS, asked)
    if needed < wanted and wanted > bounds.least:
        return ScalingDecision(wanted - 1, FITS, asked)
    return ScalingDecision(wanted, ENOUGH, asked)
