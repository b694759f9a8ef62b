"""The whole names of a chain's blocks: the index has the beginning of each (a mark), and of a segment's last block all.

What a device or a stored segment has it knows by whole names. So a chain is named by what devices and tiers say, each
name told apart by its mark. What nobody has any more has no name. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.nodes import Node
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import MARK_BYTES


class Chain:
    """The blocks of a chain of segments from block 0 on; `path` has its nodes, parents first."""

    def __init__(self, path: Sequence[Node]) -> None:
        self._path = path
        self._marks: list[bytes] = []
        for node in path:  # one that follows inside its parent leaves the rest of that out
            marks = node.marks
            del self._marks[node.start_block :]
            self._marks += [marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)]
        self._names: dict[bytes, BlockHash] = {}
        self.hear(BlockHash(node.key) for node in path)

    def hear(self, names: Iterable[BlockHash]) -> None:
        """Take names of blocks, some of which may be this chain's. O(names)."""
        unnamed = {mark for mark in self._marks if mark not in self._names}
        for name in names:
            if not unnamed:
                return
            mark = name[:MARK_BYTES]
            if mark in unnamed:
                unnamed.discard(mark)
                self._names[mark] = name

    def hear_devices(self, devices: DeviceIndex) -> None:
        """Take the names of what is on devices that have a segment of it. O(blocks of these devices)."""
        for _, held in devices.replicas():
            if any(BlockHash(node.key) in held for node in self._path):
                self.hear(held)

    def unnamed(self) -> list[Node]:
        """Return the segments that have a block without a name."""
        return [
            node
            for node in self._path
            if any(mark not in self._names for mark in self._marks[node.start_block : node.end_block])
        ]

    def names(self) -> list[BlockHash] | None:
        """Return the names of all blocks; None: of one it is not known."""
        return None if any(mark not in self._names for mark in self._marks) else [self._names[m] for m in self._marks]
