"""What only a simulator knows: when each block of a trace is used next."""

import math
from collections.abc import Sequence

from kvmanager.segments.keys import BlockHash, SegmentKey
from load_tests.simulator.trace import TraceRequest, block_key


class NextUses:
    """The future of a trace, seen from the request that is being served. One thread.

    Of no trace, the future is empty. A request uses every block of its prompt: where whole chains are stored, those
    found are its leading ones.
    """

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._uses: list[list[tuple[SegmentKey | BlockHash, float]]] = [[] for _ in trace]
        self._next: dict[SegmentKey | BlockHash, float] = {}
        keys: dict[int, BlockHash] = {}
        upcoming: dict[int, int] = {}
        for number in range(len(trace) - 1, -1, -1):
            for hash_id in trace[number].hash_ids:
                key = keys.get(hash_id) or keys.setdefault(hash_id, block_key(hash_id))
                self._uses[number].append((key, upcoming.get(hash_id, math.inf)))
                upcoming[hash_id] = number

    def serve(self, number: int) -> None:
        """Let the request with this number, from 0 on, be the one that is served now. They come in order."""
        if self._uses:
            self._next.update(self._uses[number])

    def next_use(self, key: SegmentKey | BlockHash) -> float:
        """Return the number of the first later request that uses a block; infinite if none does."""
        return self._next.get(key, math.inf)
