"""From what replicas say of their load to how many of them there should be.

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
from dataclasses import dataclass
from math import ceil

from kvmanager.scaling.figures import ReplicaLoad

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
