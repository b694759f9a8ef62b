"""Least recently used: the exposed copy whose node was used longest ago goes first; and the list that it is kept in.

`RecencyQueue` is the one data structure of LRU, SLRU, ARC and W-TinyLFU. The papers evict from the end of a list. Here
only some copies may go, so the list is a heap of those, ordered by the number that a copy got when it was touched last:
the exposed copy nearest to the list's end comes first. O(log n).
"""

from __future__ import annotations

from collections import OrderedDict

from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.nodes import Copy, Node
from kvmanager.index.score_heap import OUTSIDE, ScoreHeap


class RecencyQueue:
    """A list of copies, most recently touched last. A copy lies in at most one such list. One thread."""

    __slots__ = ("_exposed", "_touched", "_touches", "nbytes")

    def __init__(self) -> None:
        self._exposed: ScoreHeap[Copy] = ScoreHeap()
        self._touched: OrderedDict[Copy, tuple[int, int]] = OrderedDict()
        # Number of the last touch, and the size then: a copy may shrink when it is committed.
        self._touches = 0
        self.nbytes = 0
        """Of all copies in the list."""

    def __len__(self) -> int:
        return len(self._touched)

    def __contains__(self, copy: Copy) -> bool:
        return copy in self._touched

    def touch(self, copy: Copy) -> None:
        """Put a copy last, new or not."""
        self._touches += 1
        _, nbytes = self._touched.pop(copy, (0, 0))
        self.nbytes += copy.nbytes - nbytes
        self._touched[copy] = self._touches, copy.nbytes
        self._exposed.update(copy, self._touches)

    def forget(self, copy: Copy) -> None:
        """Take out a copy that is in the list, exposed or not."""
        self.nbytes -= self._touched.pop(copy)[1]
        self._exposed.discard(copy)

    def expose(self, copy: Copy) -> None:
        """Let `oldest` return a copy of the list from now on."""
        self._exposed.push(copy, self._touched[copy][0])

    def shield(self, copy: Copy) -> None:
        """Let it not."""
        self._exposed.discard(copy)

    def oldest(self) -> Copy | None:
        """Return the exposed copy touched longest ago. O(1)."""
        return self._exposed.lowest()

    def last(self) -> Copy:
        """Return the copy touched longest ago, exposed or not. The list must not be empty. O(1)."""
        return next(iter(self._touched))

    def move(self, copy: Copy, to: RecencyQueue) -> None:
        """Touch a copy of this list into another one; exposed stays exposed."""
        exposed = copy.position != OUTSIDE
        self.forget(copy)
        to.touch(copy)
        if exposed:
            to.expose(copy)


class Lru(EvictionPolicy):
    """Evicts the exposed copy used least recently. Every newcomer is admitted.

    One list of all copies, in which `used` and `stored` put a copy last. Of what one request used, the deepest goes
    first, since only leaves are exposed.
    """

    def __init__(self, setting: PolicySetting) -> None:
        super().__init__(setting)
        self._queue = RecencyQueue()

    def stored(self, copy: Copy) -> None:  # noqa: D102 - the interface says it
        self._queue.touch(copy)

    def used(self, copy: Copy) -> None:  # noqa: D102
        self._queue.touch(copy)

    def left(self, copy: Copy, evicted: bool) -> None:  # noqa: D102
        self._queue.forget(copy)

    def expose(self, copy: Copy) -> None:  # noqa: D102
        self._queue.expose(copy)

    def shield(self, copy: Copy) -> None:  # noqa: D102
        self._queue.shield(copy)

    def victim(self) -> Copy | None:  # noqa: D102
        return self._queue.oldest()

    def admits(self, newcomer: Node, victim: Copy) -> bool:  # noqa: D102
        return True
