"""Decayed LFU: the coldest leaf goes first. The default, ``lfu``, learns what is cold; ``decayed-lfu`` counts uses.

What is known of uses belongs to the node, not to the copy. So a segment that comes back after an eviction is as hot as
if it had never left: that is what lifts the hit rate above LRU while the cache is much smaller than the working set.

Learned (`kvmanager.eviction.reuse_model`): cold is what has the lowest *index*, the expected uses per request of
keeping it, by its profile (uses, branches, how much of its prompt was new, pace, ...) and its age since the last use.
A newcomer takes the place only of what is no hotter, so a scan replaces other scans, never what is used again and
again.

Cost-aware: the index counts per byte. A segment's recompute cost grows with its blocks, so what holds more blocks per
byte (a compressed form) ranks higher. The cost of depth (attention) is left out: it is small compared with that of the
weights' matrices at the lengths served, and keeping deep segments for it would cost hits.

Copies of one cohort and one cost share a *shelf*; shelves of one profile, age and cost share a *rank*; ranks lie in a
heap by index. Only ranks move when the model learns (a few at a time) and only shelves when a cohort ages, so nothing
costs O(copies): `expose`, `shield`, `victim` are O(log ranks).
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from math import exp2, log2

from kvmanager.eviction.reuse_model import Cohort, Profile, ReuseModel
from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.nodes import Copy, Node
from kvmanager.index.score_heap import OUTSIDE, ScoreHeap

SWAP = 1.45
"""A newcomer's value, divided by its victim's, must be at least this: the victim needs no copying, and estimates are
noisy."""


@lru_cache(maxsize=4096)
def _cost(num_blocks: int, nbytes: int) -> int:
    """Return the class of a segment's recompute cost per byte: two to an octave."""
    return round(2 * log2(num_blocks / max(1, nbytes)))


class _Rank:
    """Shelves of one profile, age and cost, the first that came first."""

    __slots__ = ("age", "cost", "heap", "position", "profile", "ranks", "shelves")

    def __init__(self, policy: LearnedLfu, profile: Profile, age: int, cost: int) -> None:
        self.heap = policy.heap
        self.ranks = policy.ranks
        self.profile = profile
        self.age = age
        self.cost = cost
        self.position = OUTSIDE
        self.shelves: OrderedDict[_Shelf, None] = OrderedDict()

    @property
    def score(self) -> float:
        return self.profile.index[self.age] * exp2(self.cost / 2)

    def add(self, shelf: _Shelf) -> None:
        self.shelves[shelf] = None
        if self.position == OUTSIDE:
            self.ranks[self.profile, self.age, self.cost] = self
            self.profile.ranked.append(self)
            self.heap.push(self, self.score)

    def remove(self, shelf: _Shelf) -> None:
        del self.shelves[shelf]
        if not self.shelves:
            self.heap.discard(self)
            self.profile.ranked.remove(self)
            del self.ranks[self.profile, self.age, self.cost]

    def reranked(self) -> None:
        self.heap.update(self, self.score)


class _Shelf:
    """Exposed copies of one cohort and cost."""

    __slots__ = ("cohort", "copies", "cost", "policy", "rank")

    def __init__(self, policy: LearnedLfu, cohort: Cohort, cost: int) -> None:
        self.policy = policy
        self.cohort = cohort
        self.cost = cost
        self.copies: list[Copy] = []
        self.rank = policy.rank(cohort, cost)

    def add(self, copy: Copy) -> None:
        if not self.copies:
            self.cohort.shelves.append(self)
            self.rank = self.policy.rank(self.cohort, self.cost)
            self.rank.add(self)
        copy.shelf, copy.position = self, len(self.copies)
        self.copies.append(copy)

    def remove(self, copy: Copy) -> None:
        last = self.copies.pop()
        if last is not copy:
            self.copies[copy.position] = last
            last.position = copy.position
        copy.shelf, copy.position = None, OUTSIDE
        if not self.copies:
            self.rank.remove(self)
            self.cohort.shelves.remove(self)

    def aged(self) -> None:
        self.rank.remove(self)
        self.rank = self.policy.rank(self.cohort, self.cost)
        self.rank.add(self)


class LearnedLfu(EvictionPolicy):
    """Evicts the exposed copy with the fewest expected uses per request and byte. Raises ValueError without a model."""

    learns = True

    def __init__(self, setting: PolicySetting) -> None:
        super().__init__(setting)
        if not isinstance(setting.reuse, ReuseModel):
            raise ValueError("it needs a model of reuse")
        self._model = setting.reuse
        self.heap: ScoreHeap[_Rank] = ScoreHeap()
        self.ranks: dict[tuple[Profile, int, int], _Rank] = {}
        """Those that are not empty."""

    def rank(self, cohort: Cohort, cost: int) -> _Rank:
        """Return the rank of a cohort's segments now."""
        key = (cohort.profile, cohort.age, cost)
        return self.ranks.get(key) or _Rank(self, *key)

    def expose(self, copy: Copy) -> None:  # noqa: D102 - the interface says it
        cohort = self._model.cohort_of(copy.node)
        cost = _cost(copy.node.num_blocks, copy.nbytes)
        for shelf in cohort.shelves:
            if isinstance(shelf, _Shelf) and shelf.policy is self and shelf.cost == cost:
                break
        else:
            shelf = _Shelf(self, cohort, cost)
        shelf.add(copy)

    def shield(self, copy: Copy) -> None:  # noqa: D102
        assert isinstance(copy.shelf, _Shelf)
        copy.shelf.remove(copy)

    def used(self, copy: Copy) -> None:
        """Nothing yet: `victim` finds it in its old place and moves it."""

    def victim(self) -> Copy | None:  # noqa: D102
        while (rank := self.heap.lowest()) is not None:
            shelf = next(iter(rank.shelves))
            copy = shelf.copies[-1]
            if self._model.cohort_of(copy.node) is shelf.cohort:
                return copy
            self.shield(copy)
            self.expose(copy)
        return None

    def admits(self, newcomer: Node, victim: Copy) -> bool:  # noqa: D102
        assert isinstance(victim.shelf, _Shelf)  # `victim` found it there, and in its present cohort
        cost = _cost(newcomer.num_blocks, newcomer.nbytes or victim.nbytes)
        return self._model.cohort_of(newcomer).index * exp2(cost / 2) >= SWAP * victim.shelf.rank.score


class DecayedLfu(EvictionPolicy):
    """Evicts the exposed copy with the fewest decayed uses, by one heap of scores (`kvmanager.index.hotness`).

    The count halves every ``half_life_requests`` requests, so yesterday's favourite leaves in the end. A newcomer takes
    the place of strictly colder copies only. A segment used just now weighs one use, which is more than anything used
    once before: a scan replaces other scans here, too.
    """

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
