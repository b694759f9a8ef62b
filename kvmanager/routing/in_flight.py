"""What requests in flight will leave on the device of the replica that they were sent to. One thread."""

from collections import Counter
from collections.abc import Sequence

from kvmanager.routing.prefix_reach import prefix_reach
from kvmanager.segments.keys import BlockHash


class InFlightPrefixes:
    """Ends of segments per replica, counted, for several prompts may share them. What is added is removed once."""

    def __init__(self, blocks_per_segment: int) -> None:
        self._blocks_per_segment = blocks_per_segment
        self._ends: dict[str, Counter[BlockHash]] = {}

    def add(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        """Note a prompt on its way to ``replica``. O(segments)."""
        self._ends.setdefault(replica, Counter()).update(self._cuts(hashes))

    def remove(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        """Forget a prompt that was added, unless its replica has been forgotten since. O(segments)."""
        ends = self._ends.get(replica)
        if ends is None:
            return
        for block in self._cuts(hashes):
            ends[block] -= 1
            if ends[block] <= 0:
                del ends[block]

    def forget(self, replica: str) -> None:
        """Forget all prompts of a replica."""
        self._ends.pop(replica, None)

    def reach(self, replica: str, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prompt are on their way, in whole segments. O(log segments)."""
        ends = self._ends.get(replica)
        return prefix_reach(hashes, self._blocks_per_segment, ends.__contains__) if ends else 0

    def _cuts(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return hashes[self._blocks_per_segment - 1 :: self._blocks_per_segment]
