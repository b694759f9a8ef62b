"""How many prefetch workers a load is spread over, learned from how fast loads came with how many.

More workers help as long as each one's connection is the limit, and cost time where processor, memory or Redis is: then
they only get in each other's way. Which it is cannot be known beforehand and changes, so it is measured: bytes per
second of whole loads, by the number of workers and by the load's size (a small one is mostly overhead).

* Chosen are the fewest workers whose rate is within `TOLERANCE` of the best.
* As long as nothing is known, a load uses as many as it has pieces and bytes for.
* Now and then a load tries the next smaller or larger number. One that has lost clearly is tried ever more rarely.
* A rate is the median of a few recent ones: one hiccup changes nothing, and three loads in a new situation do.

Small and bounded: some numbers per doubling of size. Pure, no clock, no randomness; not thread-safe.
"""

import collections
import heapq
import statistics
from collections.abc import Sequence

LEAST_BYTES_PER_WORKER = 1 << 20
"""Less is not worth another worker's call (about 1 ms, in which 1 GB/s brings as much)."""
TOLERANCE = 0.05
"""So much slower than the best is as good, if it takes fewer workers."""
CLEARLY_WORSE = 0.8
"""Of the best rate: a number of workers below it is tried again more and more rarely."""
TRY_EVERY = 16
"""Loads of one size between two tries of a neighbouring number of workers."""
TRY_EVERY_AT_MOST = 256
RETRY_UNMEASURED = 5
"""Loads until a try that brought no measurement, because it failed or was not alone, is made again. Odd, so that it
does not always fall together with what happens every other load."""
SAMPLES = 5
"""Recent rates of which the median counts."""
HORIZON = 64
"""Loads of one size after which a rate is too old to count, unless there is no newer one."""
LARGEST_CLASS = (64 << 20).bit_length()


class FanOut:
    """Chooses the number of workers for each load: `choose` before it, `observe` after it."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}

    def choose(self, nbytes: int, pieces: int, workers: int) -> int:
        """How many of `workers` (at least 1) shall fetch a load of so many bytes in so many pieces."""
        limit = max(1, min(workers, pieces, nbytes // LEAST_BYTES_PER_WORKER))
        return 1 if limit == 1 else self._class(nbytes).choose(limit)

    def observe(self, workers: int, nbytes: int, seconds: float) -> None:
        """Learn from a load that came whole and had the workers to itself."""
        if nbytes >= 2 * LEAST_BYTES_PER_WORKER and seconds > 0:  # less has no choice
            self._class(nbytes).observe(workers, nbytes / seconds)

    def rates(self) -> dict[int, float]:
        """Bytes per second by number of workers, of the largest loads that there have been; for people."""
        return self._classes[max(self._classes)].rates() if self._classes else {}

    def _class(self, nbytes: int) -> "_SizeClass":
        return self._classes.setdefault(min(nbytes.bit_length(), LARGEST_CLASS), _SizeClass())


class _SizeClass:
    """What has been learned of loads of one size, within a factor of two."""

    def __init__(self) -> None:
        self._loads = 0
        self._samples: dict[int, collections.deque[tuple[int, float]]] = {}
        self._used: dict[int, int] = {}
        """The last load that used so many workers."""
        self._every: dict[int, int] = {}
        """Loads between two tries of so many workers."""

    def choose(self, limit: int) -> int:
        """See `FanOut.choose`."""
        self._loads += 1
        options = sorted({1 << power for power in range(limit.bit_length()) if 1 << power < limit} | {limit})
        known = {workers: rate for workers, rate in self.rates().items() if workers in options}
        chosen = limit
        if known:
            best = self._best(known)
            chosen = self._due(options, options.index(best)) or best
        self._used[chosen] = self._loads
        return chosen

    def observe(self, workers: int, rate: float) -> None:
        """Note a rate in bytes per second."""
        others = [other for used, other in self.rates().items() if used != workers]
        self._samples.setdefault(workers, collections.deque(maxlen=SAMPLES)).append((self._loads, rate))
        if rate < CLEARLY_WORSE * max(others, default=0.0):
            self._every[workers] = min(2 * self._every.get(workers, TRY_EVERY), TRY_EVERY_AT_MOST)
        else:
            self._every[workers] = TRY_EVERY

    def rates(self) -> dict[int, float]:
        """Median of the recent rates, by number of workers."""
        return {workers: self._rate(samples) for workers, samples in sorted(self._samples.items())}

    def _rate(self, samples: Sequence[tuple[int, float]]) -> float:
        recent = [rate for load, rate in samples if load > self._loads - HORIZON]
        return statistics.median(recent) if recent else samples[-1][1]

    def _best(self, known: dict[int, float]) -> int:
        """The fewest workers that are about as fast as any."""
        enough = (1 - TOLERANCE) * max(known.values())
        return min(workers for workers, rate in known.items() if rate >= enough)

    def _due(self, options: Sequence[int], at: int) -> int | None:
        """A neighbour of the chosen number whose turn it is to be tried."""
        for neighbour in (at - 1, at + 1):
            if 0 <= neighbour < len(options):
                workers = options[neighbour]
                every = self._every[workers] if workers in self._samples else RETRY_UNMEASURED
                if workers not in self._used or self._loads - self._used[workers] >= every:
                    return workers
        return None


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
