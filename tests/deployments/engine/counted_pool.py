"""A block pool that counts the holds on its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Pool:
    """Counts the holds on each device block; a block is its own id."""

    def __init__(self) -> None:
        self.blocks = range(1000)
        self.held: Counter[int] = Counter()

    def touch(self, blocks: Iterable[int]) -> None:
        self.held.update(blocks)

    def free_blocks(self, blocks: Iterable[int]) -> None:
        self.held.subtract(blocks)
        assert min(self.held.values()) >= 0

    @property
    def now(self) -> set[int]:
        return set(+self.held)
