"""Which blocks each replica's device pool holds, as the replicas report it."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from kvmanager.segments.keys import BlockHash


class DeviceIndex:
    """Block hashes per replica. One thread."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[BlockHash]] = {}

    def stored(self, replica: str, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Add blocks; return those that were new."""
        held = self._blocks.setdefault(replica, set())
        new = [block for block in dict.fromkeys(hashes) if block not in held]
        held.update(new)
        return new

    def removed(self, replica: str, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Take blocks away; return those that were there."""
        held = self._blocks.get(replica, set())
        gone = [block for block in dict.fromkeys(hashes) if block in held]
        held.difference_update(gone)
        return gone

    def forget(self, replica: str) -> bool:
        """Forget a replica; return whether it was known."""
        return self._blocks.pop(replica, None) is not None

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
