"""The whole names of a chain's blocks: the index has the beginning of each (a mark), and of a segment's last block all.

What a device or a stored segment has it knows by whole names. So a chain is named by what devices and tiers say, each
name told apart by its mark. A block that neither has any more has no name. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.nodes import Node
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import MARK_BYTES

HEARD_AT_ONCE = 4096
"""Names of devices' blocks: a millisecond or less of the manager's loop."""


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
        self._unnamed = set(self._marks)
        self.hear(BlockHash(node.key) for node in path)

    def hear(self, names: Iterable[BlockHash]) -> None:
        """Take names of blocks, some of which may be this chain's. O(names)."""
        for name in names:
            if not self._unnamed:
                return
            mark = name[:MARK_BYTES]
            if mark in self._unnamed:
                self._unnamed.discard(mark)
                self._names[mark] = name

    def on_devices(self, devices: DeviceIndex) -> Iterator[Sequence[BlockHash]]:
        """Yield names for `hear` from devices that have a segment of it, for as long as a block has no name.

        `HEARD_AT_ONCE` names at a time; the index may change in between. O(blocks of these devices) together.
        """
        having = [held for _, held in devices.replicas() if any(BlockHash(node.key) in held for node in self._path)]
        for held in having:
            names = list(held)
            for begin in range(0, len(names), HEARD_AT_ONCE):
                if not self._unnamed:
                    return
                yield names[begin : begin + HEARD_AT_ONCE]

    def unnamed(self) -> list[Node]:
        """Return the segments that have a block without a name."""
        return [
            node for node in self._path if not self._unnamed.isdisjoint(self._marks[node.start_block : node.end_block])
        ]

    def names(self) -> list[BlockHash] | None:
        """Return the names of all blocks; None: of one it is not known."""
        return None if self._unnamed else [self._names[m] for m in self._marks]
