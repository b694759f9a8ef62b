"""Which segments wait to be copied to Redis because they have earned it.

A segment earns its copy at the moment of a use, or when a CPU tier has stored it: if it has ``min_uses`` decayed uses
then, and Redis lacks it. The first come is the first served. The queue is bounded: when more come than can be copied,
the oldest entry is dropped and counted, for what has waited longest is used least by now. That costs a save, never a
load, and the next use brings the segment back. Entries may be stale; who takes one looks again. One thread.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from math import log2

from kvmanager.counters import Counters
from kvmanager.hotness import HotnessClock
from kvmanager.keys import SegmentKey
from kvmanager.locations import Tier
from kvmanager.nodes import Node

CAPACITY = 10_000
"""Entries of about 150 bytes each."""

FRESH_USE = 0.9
"""What a use counts at least to be a whole one here: one of a few requests ago has decayed a little already, and two
uses would never make two."""


class DemotionQueue:
    """Keys of segments, first in first out, each once. Empty while it is closed: while Redis is not there."""

    def __init__(self, clock: HotnessClock, counters: Counters, min_uses: float, capacity: int = CAPACITY) -> None:
        self._clock = clock
        self._counters = counters
        self._threshold = log2(FRESH_USE * min_uses) if min_uses > 1 else float("-inf")
        self._capacity = capacity
        self._open = False
        self._waiting: OrderedDict[SegmentKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def consider(self, node: Node) -> None:
        """Let a node wait that was used, or stored, just now, if it has earned it and Redis lacks it. O(1)."""
        if not self._open or node.copies is None or node.key in self._waiting or not self._wanted(node):
            return
        if len(self._waiting) >= self._capacity:
            self._waiting.popitem(last=False)
            self._counters.dropped_demotions += 1
        self._waiting[node.key] = None

    def open(self, nodes: Iterable[Node]) -> None:
        """Start with the hottest of ``nodes`` that have earned it, if the queue was closed. O(nodes)."""
        if self._open:
            return
        self._open = True
        wanted = (node for node in nodes if self._wanted(node))
        for node in heapq.nlargest(self._capacity, wanted, key=lambda node: node.score):
            self._waiting[node.key] = None

    def close(self) -> None:
        """Forget all that waits, and let nothing wait until `open`."""
        self._open = False
        self._waiting.clear()

    def first(self) -> SegmentKey:
        """Return the key that has waited longest, and leave it. The queue must not be empty."""
        return next(iter(self._waiting))

    def pop(self) -> None:
        """Take `first` out."""
        self._waiting.popitem(last=False)

    def _wanted(self, node: Node) -> bool:
        if node.score < self._clock.now + self._threshold:
            return False
        at_cpu = False
        for copy in node.all_copies():
            if copy.store.location.tier is Tier.REDIS:
                return False
            at_cpu = at_cpu or copy.resident
        return at_cpu
