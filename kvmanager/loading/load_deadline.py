"""How long a load may take once it has begun: the one rule of plans, leases and replicas.

``base + DEADLINE_FACTOR · expected time of its bytes``, at most `MOST_LOAD_S`

So a load of 100,000 tokens has the time that its bytes need, and a short one ends soon. What brings nothing is cut off
long before, by the wait for a single segment (`segment_wait_s`), and what comes too slowly to be worth it by its pace
(`kvmanager.loading.prefix_load`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import LinearTime

DEADLINE_FACTOR = 3.0
"""Deadline over expected time: links are shared, and measured rates are means."""
UNKNOWN_BYTES_PER_S = 200e6
"""Taken for a tier without measurements: less than a disk or a fast network, more than a slow one."""
MOST_LOAD_S = 600.0
"""A lease whose release was lost keeps its segments from being evicted no longer."""


def load_deadline_s(base_s: float, nbytes: Mapping[Tier, float], times: Mapping[Tier, LinearTime]) -> float:
    """Return the seconds allowed for a load of ``nbytes``, as they are stored, by tier.

    ``times``: what is measured; other bytes that the load has to wait for count among ``nbytes``.
    """
    expected_s = 0.0
    for tier, size in nbytes.items():
        time = times.get(tier)
        expected_s += time.seconds(size) if time is not None else size / UNKNOWN_BYTES_PER_S
    return min(MOST_LOAD_S, base_s + DEADLINE_FACTOR * expected_s)


def segment_wait_s(base_s: float, nbytes: int) -> float:
    """Return how long the next segment of a load may take that has ``nbytes``; ``base_s`` for one of no size."""
    return base_s + DEADLINE_FACTOR * nbytes / UNKNOWN_BYTES_PER_S
