"""A prompt's load under a time target: after each segment, whether to wait for the next one.

An engine computes all that follows a computed token. So the choice is never among forms of one segment: it is to wait
for what is stored, or to compute all the rest. Segments come one after the other, as over one link. Pure: times are
seconds that the caller measured, on one clock that does not jump.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


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
