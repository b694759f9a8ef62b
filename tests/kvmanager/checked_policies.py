"""Every eviction policy, checked: what it is told makes sense, and what it does is written down."""

import sys

from coldest_first import ColdestFirst

from kvmanager.eviction.policies import find_policy
from load_tests.simulator.policies import served_name, simulated_names

evictions = None
"""Where the policies of the world at work note what is evicted to make room, in order."""


class Checked:
    """Mixed into a policy: what it is told makes sense, and is remembered."""

    def __init__(self, setting):
        super().__init__(setting)
        self.here, self.exposed = set(), set()

    def stored(self, copy):
        assert copy not in self.here
        self.here.add(copy)
        super().stored(copy)

    def expose(self, copy):
        assert copy in self.here - self.exposed
        self.exposed.add(copy)
        super().expose(copy)

    def shield(self, copy):
        self.exposed.remove(copy)
        super().shield(copy)

    def used(self, copy):
        assert copy in self.here
        super().used(copy)

    def victim(self):
        victim = super().victim()
        assert victim in self.exposed if self.exposed else victim is None
        return victim

    def left(self, copy, evicted):
        assert copy in self.here - self.exposed
        self.here.remove(copy)
        super().left(copy, evicted)
        if evicted:
            evictions.append((copy.store.location, copy.node.key))


POLICIES = {"coldest first": type("CheckedColdestFirst", (Checked, ColdestFirst), {})}
"""By name, each with its checks; the first is the only one whose choices the naive manager foresees."""
for _name in simulated_names():
    _class = find_policy(served_name(_name))
    POLICIES[_name] = type(f"Checked{_class.__name__}", (Checked, _class), {})
for _policy in POLICIES.values():
    setattr(sys.modules[__name__], _policy.__name__, _policy)
