"""ARC, adaptive replacement (Megiddo & Modha, *ARC: A Self-Tuning, Low Overhead Replacement Cache*, FAST 2003).

T1 holds what was used once, T2 what was used again, both by recency; B1 and B2 remember the keys of what was evicted
from them. A newcomer remembered in B1 says that T1 is too small, one in B2 that T2 is: the target size of T1 moves by
as much as the other list of ghosts is longer. The victim comes from T1 while it is above its target, else from T2.

Sizes are bytes here, and the victim is the list's oldest *exposed* copy; of the other list when it has none.
"""

from collections import OrderedDict

from kvmanager.eviction.policies.lru import RecencyQueue
from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.nodes import Copy, Node
from kvmanager.segments.keys import SegmentKey


class _Ghosts:
    """Keys of evicted copies with their sizes, oldest first."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: OrderedDict[SegmentKey, int] = OrderedDict()

    def __contains__(self, key: SegmentKey) -> bool:
        return key in self._sizes

    def add(self, key: SegmentKey, nbytes: int) -> None:
        self.remove(key)
        self._sizes[key] = nbytes
        self.nbytes += nbytes

    def remove(self, key: SegmentKey) -> None:
        self.nbytes -= self._sizes.pop(key, 0)

    def shrink(self, nbytes: int) -> None:
        while self._sizes and self.nbytes > nbytes:
            self.nbytes -= self._sizes.popitem(last=False)[1]


class Arc(EvictionPolicy):
    """Balances recency against frequency by what it evicted too early."""

    def __init__(self, setting: PolicySetting) -> None:
        super().__init__(setting)
        self._t1, self._t2 = RecencyQueue(), RecencyQueue()
        self._b1, self._b2 = _Ghosts(), _Ghosts()
        self._target = 0.0
        """Of T1, in bytes."""

    def stored(self, copy: Copy) -> None:  # noqa: D102 - the interface says it
        key, size, budget = copy.node.key, copy.nbytes, self.setting.budget_bytes()
        if key in self._b1:
            self._target = min(budget, self._target + size * max(1.0, self._b2.nbytes / self._b1.nbytes))
            self._b1.remove(key)
            self._t2.touch(copy)
        elif key in self._b2:
            self._target = max(0.0, self._target - size * max(1.0, self._b1.nbytes / self._b2.nbytes))
            self._b2.remove(key)
            self._t2.touch(copy)
        else:
            self._t1.touch(copy)

    def used(self, copy: Copy) -> None:  # noqa: D102
        if copy in self._t1:
            self._t1.move(copy, self._t2)
        else:
            self._t2.touch(copy)

    def left(self, copy: Copy, evicted: bool) -> None:  # noqa: D102
        once = copy in self._t1
        (self._t1 if once else self._t2).forget(copy)
        if evicted:
            budget = self.setting.budget_bytes()
            (self._b1 if once else self._b2).add(copy.node.key, copy.nbytes)
            self._b1.shrink(max(0, budget - self._t1.nbytes))
            self._b2.shrink(max(0, 2 * budget - self._t1.nbytes - self._t2.nbytes - self._b1.nbytes))

    def expose(self, copy: Copy) -> None:  # noqa: D102
        (self._t1 if copy in self._t1 else self._t2).expose(copy)

    def shield(self, copy: Copy) -> None:  # noqa: D102
        (self._t1 if copy in self._t1 else self._t2).shield(copy)

    def victim(self) -> Copy | None:  # noqa: D102
        first, second = (self._t1, self._t2) if self._t1.nbytes > self._target else (self._t2, self._t1)
        return first.oldest() or second.oldest()

    def admits(self, newcomer: Node, victim: Copy) -> bool:  # noqa: D102
        return True
