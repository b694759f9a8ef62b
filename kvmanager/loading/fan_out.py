"""How many prefetch workers share a load, and which pieces each fetches: a rule by bytes and by the measured link.

More workers help while each one's connection is the limit; then all that are worth a call are used. Where one
connection brings more than a processor verifies and copies meanwhile, workers only contend for processors; then half as
many as there are processors are used. What one connection brings is measured by loads that one worker brought alone:
small ones do anyway, and now and then a larger one does for that. Pure, no clock; not thread-safe.
"""

import collections
import heapq
import statistics
from collections.abc import Sequence

LEAST_BYTES_PER_WORKER = 1 << 20
"""Less is not worth another worker's call (about 1 ms, in which 1 GB/s brings as much)."""
PROCESSOR_BYTES_PER_S = 200e6
"""A connection that brings so much or more leaves a processor no time to wait for it."""
MEASURE_EVERY = 64
"""Loads after which one goes over a single connection, if none did."""
RATES = 3
"""Of the last so many rates the median counts: one hiccup changes nothing."""


class FanOut:
    """Chooses the number of workers for each load: `choose` before it, `measured` after one over one connection."""

    def __init__(self, processors: int) -> None:
        self._processors = processors
        self._rates: collections.deque[float] = collections.deque(maxlen=RATES)
        self._unmeasured = MEASURE_EVERY
        """Loads since one was over a single connection."""

    @property
    def connection_bytes_per_s(self) -> float | None:
        """What one connection brings; None as long as it is not measured."""
        return statistics.median(self._rates) if self._rates else None

    def choose(self, nbytes: int, pieces: int, workers: int, alone: bool) -> int:
        """How many of `workers` (at least 1) shall fetch a load of so many bytes in so many pieces.

        `alone`: no other load is under way, so this one could be measured.
        """
        worth_while = max(1, min(workers, pieces, nbytes // LEAST_BYTES_PER_WORKER))
        self._unmeasured += 1
        if worth_while == 1 or (alone and self._unmeasured > MEASURE_EVERY):
            return 1
        rate = self.connection_bytes_per_s
        if rate is not None and rate >= PROCESSOR_BYTES_PER_S:
            return min(worth_while, max(1, self._processors // 2))
        return worth_while

    def measured(self, nbytes: int, seconds: float) -> None:
        """Note a load that one worker brought whole and alone."""
        if nbytes >= LEAST_BYTES_PER_WORKER and seconds > 0:  # less is mostly overhead
            self._rates.append(nbytes / seconds)
            self._unmeasured = 0


def assign(sizes: Sequence[int], queued: Sequence[int], workers: int) -> list[int]:
    """Which worker fetches each piece of a load: along the sequence, the one that will be free first.

    `sizes` are the pieces' bytes in the sequence's order; `queued` the bytes that each worker still has to fetch for
    others. The `workers` with the least are used. Returns indices into `queued`, one per piece: with equal pieces and
    idle workers the pieces go around, so the first ones come first. O(pieces · log workers).
    """
    free = [(nbytes, index) for index, nbytes in enumerate(queued)]
    free = heapq.nsmallest(workers, free)
    chosen = []
    for size in sizes:
        nbytes, index = free[0]
        heapq.heapreplace(free, (nbytes + size, index))
        chosen.append(index)
    return chosen
