"""The simplest eviction policy, with an order that tests can foresee whatever the default learns."""

from kvmanager.index.eviction_policy import EvictionPolicy


class ColdestFirst(EvictionPolicy):
    """The lowest score goes, the first exposed of equals, and only for a higher one."""

    def __init__(self, setting):
        super().__init__(setting)
        self._exposed = {}

    def expose(self, copy):
        self._exposed[copy] = None

    def shield(self, copy):
        del self._exposed[copy]

    def used(self, copy):
        pass

    def victim(self):
        return min(self._exposed, key=lambda copy: copy.node.score, default=None)

    def admits(self, newcomer, victim):
        return newcomer.score > victim.node.score
