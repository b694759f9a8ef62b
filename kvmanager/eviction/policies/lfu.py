"""Decayed LFU with memory: the coldest leaf goes first.

One heap of the exposed copies by the score of their node (`kvmanager.index.hotness`). The count halves every
``half_life_requests`` requests, so yesterday's favourite leaves in the end; and it belongs to the node, not to the
copy, so a segment that comes back after an eviction is as hot as if it had never left: that is what lifts the hit rate
above LRU while the cache is much smaller than the working set.

Admission: a newcomer takes the place of strictly colder copies only. A segment used just now weighs one use, which is
more than anything used once before: a scan replaces other scans, never what is used again and again.
"""

from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.nodes import Copy, Node
from kvmanager.index.score_heap import ScoreHeap


class DecayedLfu(EvictionPolicy):
    """Evicts the exposed copy with the fewest decayed uses."""

    def __init__(self, setting: PolicySetting) -> None:
        super().__init__(setting)
        self._exposed: ScoreHeap[Copy] = ScoreHeap()

    def expose(self, copy: Copy) -> None:  # noqa: D102 - the interface says it
        self._exposed.push(copy, copy.node.score)

    def shield(self, copy: Copy) -> None:  # noqa: D102
        self._exposed.discard(copy)

    def used(self, copy: Copy) -> None:  # noqa: D102
        self._exposed.update(copy, copy.node.score)

    def victim(self) -> Copy | None:  # noqa: D102
        return self._exposed.lowest()

    def admits(self, newcomer: Node, victim: Copy) -> bool:  # noqa: D102
        return newcomer.score > victim.node.score
