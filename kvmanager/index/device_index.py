"""Which blocks each replica's device pool holds, as the replicas report it, and the events that tell of it."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from kvmanager.index.deltas import HASHES_PER_EVENT, DeltaLog
from kvmanager.segments.keys import BlockHash


class DeviceIndex:
    """Block hashes per replica. One thread."""

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._blocks: dict[str, set[BlockHash]] = {}

    def stored(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Add blocks."""
        held = self._blocks.setdefault(replica, set())
        new = [block for block in dict.fromkeys(hashes) if block not in held]
        held.update(new)
        for start in range(0, len(new), HASHES_PER_EVENT):
            self._log.append(("dev+", replica, new[start : start + HASHES_PER_EVENT]))

    def removed(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Take blocks away."""
        held = self._blocks.get(replica, set())
        gone = [block for block in dict.fromkeys(hashes) if block in held]
        held.difference_update(gone)
        for start in range(0, len(gone), HASHES_PER_EVENT):
            self._log.append(("dev-", replica, gone[start : start + HASHES_PER_EVENT]))

    def forget(self, replica: str) -> None:
        """Forget a replica, if it is known."""
        if self._blocks.pop(replica, None) is not None:
            self._log.append(("dev0", replica))

    def leading_blocks(self, replica: str, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of ``hashes`` the replica holds. O(result): a pool may have holes."""
        held = self._blocks.get(replica)
        if not held:
            return 0
        for position, block in enumerate(hashes):
            if block not in held:
                return position
        return len(hashes)

    def held(self, replica: str) -> Collection[BlockHash]:
        """Return the blocks that a replica holds, in no order; not to be changed."""
        return self._blocks.get(replica, ())

    def replicas(self) -> Iterator[tuple[str, set[BlockHash]]]:
        """Yield each replica that has reported, with its blocks."""
        yield from self._blocks.items()
