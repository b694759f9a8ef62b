"""W-TinyLFU (Einziger, Friedman & Manes, *TinyLFU: A Highly Efficient Cache Admission Policy*, ACM TOS 2017).

A *window* of `WINDOW` of the budget takes newcomers by LRU; the rest is segmented LRU. What falls out of the window
enters the main part only when it was used more often than the copy that it would push out: else it goes itself.

The paper counts uses in a sketch and halves it now and then. Here the trie counts them anyway, exactly, decayed by
half-life and beyond eviction (`kvmanager.index.hotness`), so there is no sketch.
"""

from kvmanager.eviction.policies.lru import RecencyQueue
from kvmanager.index.eviction_policy import PolicySetting
from kvmanager.index.nodes import Copy
from load_tests.simulator.policies.slru import SegmentedLru

WINDOW = 0.01


class WTinyLfu(SegmentedLru):
    """A small LRU window before segmented LRU, with admission by frequency in between."""

    def __init__(self, setting: PolicySetting) -> None:
        super().__init__(setting)
        self.window = RecencyQueue()
        self._full = False

    def stored(self, copy: Copy) -> None:  # noqa: D102 - the interface says it
        self.window.touch(copy)
        while not self._full and self._window_is_over() and len(self.window) > 1:
            self.window.move(self.window.last(), self.probation)  # there is room for all

    def used(self, copy: Copy) -> None:  # noqa: D102
        if copy in self.window:
            self.window.touch(copy)
        else:
            super().used(copy)

    def victim(self) -> Copy | None:  # noqa: D102
        self._full = True
        candidate, victim = self.window.oldest(), super().victim()
        if candidate is None or (victim is not None and not self._window_is_over()):
            return victim
        if victim is None or candidate.node.score <= victim.node.score:
            return candidate
        self.window.move(candidate, self.probation)  # it has won: what it pushes out goes
        return victim

    def _window_is_over(self) -> bool:
        return self.window.nbytes > WINDOW * self.setting.budget_bytes()

    def _queue(self, copy: Copy) -> RecencyQueue:
        return self.window if copy in self.window else super()._queue(copy)
