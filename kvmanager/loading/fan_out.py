"""How many prefetch workers share a load, and which pieces each fetches. Pure."""

import heapq
from collections.abc import Sequence

LEAST_BYTES_PER_WORKER = 1 << 20
"""Less is not worth another worker's call (about 1 ms, in which 1 GB/s brings as much)."""


def workers_for(nbytes: int, pieces: int, workers: int) -> int:
    """Return how many of `workers` (at least 1) fetch a load of `nbytes` in `pieces`: all that are worth a call."""
    return max(1, min(workers, pieces, nbytes // LEAST_BYTES_PER_WORKER))


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
