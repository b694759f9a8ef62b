"""Which segments wait to be copied to Redis because they have earned it, or because a client has ordered it.

A segment earns its copy at the moment of a use, or when a CPU tier has stored it: if it has ``min_uses`` decayed uses
then, and Redis lacks it. The first come is the first served. The queue is bounded: when more come than can be copied,
the oldest entry is dropped and counted, for what has waited longest is used least by now. That costs a save, never a
load, and the next use brings the segment back. Entries may be stale; the caller that takes one checks it. One thread.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from math import log2

from kvmanager.index.counters import Counters
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Copy, Node
from kvmanager.segments.keys import SegmentKey

CAPACITY = 10_000
"""Entries of about 150 bytes each."""

MOST_ORDERED = 10_000
"""Segments of all tenants that wait because they were ordered."""

FRESH_USE = 0.9
"""What a use counts at least to be a whole one here: one of a few requests ago has decayed a little already, and two
uses would never make two."""


class DemotionQueue:
    """Keys of segments, first in first out, each once. Empty while it is closed: while Redis is not there."""

    def __init__(self, clock: HotnessClock, counters: Counters, min_uses: float, capacity: int = CAPACITY) -> None:
        self._clock = clock
        self._counters = counters
        self._threshold = log2(FRESH_USE * min_uses) if min_uses > 1 else float("-inf")
        self.capacity = capacity
        self._open = False
        self._survey: Survey | None = None
        self._waiting: OrderedDict[SegmentKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def consider(self, node: Node) -> None:
        """Let a node wait that was used, or stored, just now, if it has earned it and Redis lacks it. O(1)."""
        if not self._open or node.copies is None or node.key in self._waiting or not self.wanted(node):
            return
        if len(self._waiting) >= self.capacity:
            self._waiting.popitem(last=False)
            self._counters.dropped_demotions += 1
        self._waiting[node.key] = None

    def open(self, nodes: Iterable[Node]) -> Survey | None:
        """Let nodes wait from now on. Returns what puts the hottest of ``nodes`` that have earned it behind them.

        None: the queue was open.
        """
        if self._open:
            return None
        self._open = True
        self._survey = Survey(self, list(nodes))
        return self._survey

    def add_earliest(self, survey: Survey, nodes: Iterable[Node]) -> None:
        """Queue these while there is room, unless the queue was closed since the survey began."""
        if survey is not self._survey:
            return
        for node in nodes:
            if len(self._waiting) < self.capacity and node.key not in self._waiting and self.wanted(node):
                self._waiting[node.key] = None

    def close(self) -> None:
        """Forget all that waits, and let nothing wait until `open`."""
        self._open = False
        self._survey = None
        self._waiting.clear()

    def first(self) -> SegmentKey:
        """Return the key that has waited longest, and leave it. The queue must not be empty."""
        return next(iter(self._waiting))

    def pop(self) -> None:
        """Take `first` out."""
        self._waiting.popitem(last=False)

    def wanted(self, node: Node) -> bool:
        """Return whether a node has earned its copy at Redis, and Redis lacks it."""
        if node.score < self._clock.now + self._threshold:
            return False
        at_cpu = False
        for copy in node.all_copies():
            if copy.store.location.tier is Tier.REDIS:
                return False
            at_cpu = at_cpu or copy.resident
        return at_cpu


class Survey:
    """Finds the hottest nodes that have earned a copy at Redis, a bounded number with each step."""

    def __init__(self, queue: DemotionQueue, nodes: list[Node]) -> None:
        self._queue = queue
        self._nodes = nodes
        self._found: list[Node] = []

    @property
    def done(self) -> bool:
        """Whether the queue has them."""
        return not self._nodes

    def step(self, most: int) -> tuple[list[Copy], int]:
        """Look at ``most`` nodes; the first value is for `kvmanager.index.sweeps`, and empty."""
        looked_at = self._nodes[-most:]
        del self._nodes[-most:]
        self._found += [node for node in looked_at if self._queue.wanted(node)]
        if not self._nodes or len(self._found) > 2 * self._queue.capacity:
            self._found = heapq.nlargest(self._queue.capacity, self._found, key=lambda node: node.score)
        if not self._nodes:
            self._queue.add_earliest(self, self._found)
        return [], len(looked_at)


class Ordered:
    """Segments ordered to be copied now, each once.

    Tenants take turns, and each one's come first in first out. Beyond `MOST_ORDERED` the tenant with the most loses its
    last one: none fills the room of the others.
    """

    def __init__(self) -> None:
        self.waiting: dict[SegmentKey, str] = {}
        """With the tenant's tag."""
        self._of: dict[str, dict[SegmentKey, None]] = {}
        """By tenant; none is empty, and the first has its turn."""

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, nodes: Iterable[Node]) -> None:
        """Let segments wait, parents first. O(nodes), and each times the tenants where it is full."""
        for node in nodes:
            if node.key in self.waiting:
                continue
            self.waiting[node.key] = node.tenant
            self._of.setdefault(node.tenant, {})[node.key] = None
            if len(self.waiting) > MOST_ORDERED:
                most = max(self._of.values(), key=len)
                self._drop(next(reversed(most)))
                if node.key not in self.waiting:
                    return  # nor would what follows on it find room

    def first(self) -> SegmentKey:
        """Return whose turn it is; there must be one."""
        return next(iter(next(iter(self._of.values()))))

    def pop(self) -> None:
        """Take that one out; it is another tenant's turn then."""
        key = self.first()
        tenant = self.waiting[key]
        self._drop(key)
        if tenant in self._of:
            self._of[tenant] = self._of.pop(tenant)

    def _drop(self, key: SegmentKey) -> None:
        tenant = self.waiting.pop(key)
        del self._of[tenant][key]
        if not self._of[tenant]:
            del self._of[tenant]
