"""Renewals: what was used must not expire in Redis, and no parent before what hangs on it.

A segment expires in Redis some time after it was written there, or *renewed*. What answers prompts from a device or a
CPU tier is never read from Redis, so only the manager knows that it was used, and orders it renewed.

* A segment is renewed when it was used and its last renewal is ``every_s`` ago, and all that it follows on with it.
* What is written to Redis later than what it follows on has that renewed too.
* `take` names children before their parents, and the caller that renews them keeps that order. So a parent never
  expires before a child, up to the time from one `take` to the next.

Of the segments of a prompt only those are looked at that no other one follows on: what they follow on was renewed no
earlier. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmanager.index.counters import Counters
from kvmanager.index.locations import REDIS, Location
from kvmanager.index.nodes import Copy, Node
from kvmanager.index.stores import Store
from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import SegmentKey


@dataclass(frozen=True, slots=True)
class AtRedis:
    """What the index says of a segment at Redis."""

    nbytes: int
    cpu_tier: Location | None
    """One that has it too."""


class Renewals:
    """See the module's docstring. ``every_s`` 0: nothing expires, and nothing is renewed."""

    def __init__(self, trie: PrefixTrie, stores: Mapping[Location, Store], counters: Counters, every_s: float) -> None:
        self._trie = trie
        self._stores = stores
        self._counters = counters
        self._every_s = every_s
        self._due: dict[SegmentKey, None] = {}
        """Ends of chains."""

    def used(self, now: float, path: Sequence[Node]) -> None:
        """Note a use of nodes, parents first, and of all that they follow on. O(path, and what Redis lacks of it)."""
        redis = self._redis()
        if redis is None:
            return
        seen: set[Node] = set()
        below: Node | None = None
        for node in reversed(path):
            follows, below = below is not None and below.parent is node, node
            step = None if follows else node  # else the walk from a node that follows on it has come here
            while step is not None and step not in seen:
                seen.add(step)
                copy = step.copy_at(redis)
                if copy is not None and copy.resident:
                    if now - copy.renewed >= self._every_s:
                        self._due[step.key] = None
                    break
                step = step.parent

    def written(self, now: float, keys: Iterable[SegmentKey]) -> None:
        """Note that segments were written to Redis. O(keys)."""
        redis = self._redis()
        for key in keys if redis is not None else ():
            node = self._trie.nodes.get(key)
            copy = None if node is None or redis is None else node.copy_at(redis)
            if node is not None and copy is not None and copy.resident:
                copy.renewed = now
                if node.parent is not None:
                    self._due[node.parent.key] = None

    def take(self, now: float, most: int) -> list[SegmentKey]:
        """Return what is to be renewed now, children before parents: whole chains, until they are ``most`` or more.

        To be called every second or so. O(result).
        """
        redis = self._redis()
        if redis is None:
            self._due.clear()
            return []
        taken: dict[SegmentKey, Copy] = {}
        while self._due and len(taken) < most:
            key, _ = self._due.popitem()
            node = self._trie.nodes.get(key)
            while node is not None and node.key not in taken:
                copy = node.copy_at(redis)
                if copy is not None and copy.resident:
                    taken[node.key] = copy
                node = node.parent
        for copy in taken.values():
            copy.renewed = now
        self._counters.renewed_segments += len(taken)
        return sorted(taken, key=lambda key: taken[key].node.start_block, reverse=True)

    def indexed(self, key: SegmentKey) -> AtRedis | None:
        """Return what the index says of a segment at Redis; None: that it is not there."""
        redis = self._stores.get(REDIS)
        node = self._trie.nodes.get(key)
        copy = None if node is None or redis is None else node.copy_at(redis)
        if node is None or copy is None or not copy.resident:
            return None
        elsewhere = (other.store.location for other in node.all_copies() if other.resident and other is not copy)
        return AtRedis(copy.nbytes, next(elsewhere, None))

    def restored(self) -> None:
        """Note that a segment which Redis had lost was copied there once more."""
        self._counters.restored_segments += 1

    def _redis(self) -> Store | None:
        return self._stores.get(REDIS) if self._every_s else None
