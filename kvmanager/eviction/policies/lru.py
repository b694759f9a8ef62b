"""Least recently used: the exposed copy whose node was used longest ago goes first.

One list of all copies by last use, in which `used` and `stored` put a copy last. Of what one request used, the deepest
goes first, since only leaves are exposed. Every newcomer is admitted.
"""

from kvmanager.eviction.policies.recency import RecencyQueue
from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.nodes import Copy, Node


class Lru(EvictionPolicy):
    """Evicts the exposed copy used least recently."""

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
