"""Hotness: a use count that halves every ``half_life_requests`` requests, comparable without being touched.

Forward decay (Cormode et al., *Forward Decay: A Practical Time Decay Model for Streaming Systems*, ICDE 2009): instead
of shrinking every old count as time passes, a use at time t counts ``2 ** (t / half_life)``, more the later it comes.
The decayed count at time ``now`` is that sum divided by ``2 ** (now / half_life)``, the same divisor for every node:
the order of nodes never changes while they are not used, so a heap of scores needs no maintenance. The sum is kept as
its base-2 logarithm, which cannot overflow. Time is the number of requests seen: an idle night makes nothing cold.
"""

from math import exp2, log2


class HotnessClock:
    """The time of hotness, in requests, and the arithmetic of scores. One thread."""

    __slots__ = ("_half_life", "_requests", "now")

    def __init__(self, half_life_requests: float) -> None:
        if half_life_requests <= 0:
            raise ValueError(f"half_life_requests must be positive, got {half_life_requests}")
        self._half_life = half_life_requests
        self._requests = 0
        self.now = 0.0
        """Score of one use made now."""

    def tick(self) -> None:
        """Count one request."""
        self._requests += 1
        self.now = self._requests / self._half_life

    def used(self, score: float) -> float:
        """Return ``score`` with one use made now added to it."""
        gap = score - self.now
        if gap >= 0.0:
            return score + log2(1.0 + exp2(-gap))
        return self.now + log2(1.0 + exp2(gap))

    def uses(self, score: float) -> float:
        """Return the decayed number of uses that ``score`` stands for now."""
        return exp2(score - self.now)
