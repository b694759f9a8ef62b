"""How long a prompt's load may take once it has begun, and, after each of its segments, whether to wait for the next.

The deadline is one rule of plans, leases and replicas: ``base + DEADLINE_FACTOR · expected time of its bytes``, at most
`MOST_LOAD_S`. So a load of 100,000 tokens has the time that its bytes need, and a short one ends soon. What brings
nothing is cut off long before, by the wait for a single segment (`segment_wait_s`), and what comes too slowly to be
worth it by its pace (`PrefixLoad`).

An engine computes all that follows a computed token. So the choice is never among forms of one segment: it is to wait
for what is stored, or to compute all the rest. Segments come one after the other, as over one link. Pure: times are
seconds that the caller measured, on one clock that does not jump.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

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


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """One segment of the load: its bytes as stored, and the seconds of computing it, what precedes it being there."""

    nbytes: int
    recompute_s: float


def segments_to_wait_for(segments: Sequence[LoadedSegment], left_s: float, bytes_per_s: float) -> int:
    """Return how many of ``segments`` to load.

    All of them if they are expected to be there in ``left_s``; otherwise as many as are expected to take the least time
    together with computing the others, of equals the fewest. O(segments).
    """
    loads = [segment.nbytes / bytes_per_s for segment in segments]
    if sum(loads) <= left_s:
        return len(segments)
    took_s = least_s = sum(segment.recompute_s for segment in segments)
    best = 0
    for number, (segment, load_s) in enumerate(zip(segments, loads, strict=True), start=1):
        took_s += load_s - segment.recompute_s
        if took_s < least_s:
            best, least_s = number, took_s
    return best


class PrefixLoad:
    """A load under way against a target, or without one as long as it pays. One thread at a time."""

    def __init__(
        self,
        segments: Sequence[LoadedSegment],
        rest_s: float,
        now: float,
        target_at: float = -inf,
        least_s: float = 0.0,
    ) -> None:
        """``rest_s``: computing what follows the segments, which are asked for ``now``.

        ``least_s``: how long the load goes on, however slow it is. Without ``target_at`` it goes on after that while
        loading the rest is expected to be faster than computing it.
        """
        self._segments = segments
        self._rest_s = rest_s
        self._began = now
        self._target_at = target_at
        self._least_s = least_s
        self._arrived = 0
        self._bytes = 0

    @property
    def give_up_at(self) -> float:
        """Until when to wait for a segment: what is left by then can still be computed before the target.

        Without end where even computing everything at once would miss it: then only loading can help.
        """
        last = self._target_at - self._rest_s - sum(segment.recompute_s for segment in self._segments)
        return last if last > self._began else inf

    def begins(self, now: float) -> None:
        """Note that the segments are asked for only ``now``."""
        self._began = now

    def arrived(self, now: float) -> bool:
        """Note that the next segment is there; return whether to wait for the one after it."""
        self._bytes += self._segments[self._arrived].nbytes
        self._arrived += 1
        if now < self._began + self._least_s:
            return True
        rest = self._segments[self._arrived :]
        bytes_per_s = self._bytes / max(now - self._began, 1e-6)
        return segments_to_wait_for(rest, self._target_at - now - self._rest_s, bytes_per_s) > 0
