"""Segmented LRU (Karedla, Love & Wherry, *Caching Strategies to Improve Disk System Performance*, IEEE Computer 1994).

*Probation* takes newcomers; a second use moves a copy to *protected*, which holds `PROTECTED` of the budget at most:
what was used there longest ago goes back to probation, as its youngest. The victim is the oldest exposed copy of
probation, of protected only when probation has none: a scan passes through probation alone.
"""

from kvmanager.eviction.policies.lru import RecencyQueue
from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.nodes import Copy, Node

PROTECTED = 0.8
"""Share of the budget; the usual one (Caffeine, memcached)."""


class SegmentedLru(EvictionPolicy):
    """Evicts what was used once before what was used twice; each by recency."""

    def __init__(self, setting: PolicySetting) -> None:
        super().__init__(setting)
        self.probation, self.protected = RecencyQueue(), RecencyQueue()

    def stored(self, copy: Copy) -> None:  # noqa: D102 - the interface says it
        self.probation.touch(copy)

    def used(self, copy: Copy) -> None:  # noqa: D102
        if copy in self.protected:
            self.protected.touch(copy)
            return
        self.probation.move(copy, self.protected)
        while self.protected.nbytes > PROTECTED * self.setting.budget_bytes() and len(self.protected) > 1:
            self.protected.move(self.protected.last(), self.probation)

    def left(self, copy: Copy, evicted: bool) -> None:  # noqa: D102
        self._queue(copy).forget(copy)

    def expose(self, copy: Copy) -> None:  # noqa: D102
        self._queue(copy).expose(copy)

    def shield(self, copy: Copy) -> None:  # noqa: D102
        self._queue(copy).shield(copy)

    def victim(self) -> Copy | None:  # noqa: D102
        return self.probation.oldest() or self.protected.oldest()

    def admits(self, newcomer: Node, victim: Copy) -> bool:  # noqa: D102
        return True

    def _queue(self, copy: Copy) -> RecencyQueue:
        return self.protected if copy in self.protected else self.probation
