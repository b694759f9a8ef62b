"""Plans: what one replica may load for one prompt, and the leases that keep it there meanwhile.

A lease is a promise with an end: until it is released or `lease_s` has passed, what the plan handed out is not evicted.
Whoever dies without releasing delays evictions by that time at most. Leases end in the order of a heap, so expiring
costs only what expires. One thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import Literal, NamedTuple, TypeAlias

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.locations import Location, Tier
from kvmanager.index.nodes import Copy, Node
from kvmanager.index.prefix_reach import prefix_reach
from kvmanager.moves.renewals import Renewals
from kvmanager.segments.keys import BlockHash, SegmentKey


class PlanReason(StrEnum):
    """Why a plan is what it is."""

    HIT = "hit"
    """There is something to load, and all that is stored is loaded."""
    PARTIAL = "partial"
    """The first part of what is stored is loaded; computing the rest is faster."""
    RECOMPUTE_FASTER = "recompute_faster"
    """Something is stored, but computing all of it is faster than loading any."""
    PROBE = "probe"
    """What would be slower, by all that is known, to measure it: one segment more is loaded, or nothing."""
    UNMEASURED = "unmeasured"
    """Something is stored where nobody knows how long loads take, and enough others are finding out."""
    RECOMPUTE_ALWAYS = "recompute_always"
    """Something is stored, but the settings say that nothing is loaded."""
    DEVICE = "device"
    """The replica holds on its device all that is stored of this prompt."""
    EVICTED = "evicted"
    """The prompt's beginning was seen before, but is stored nowhere (any more, or yet)."""
    COLD = "cold"
    """Never seen, or forgotten."""


class PlannedSegment(NamedTuple):
    """One segment to load, and from where."""

    key: SegmentKey
    start_block: int
    num_blocks: int
    location: Location
    nbytes: int
    """Size there, which may be coded."""
    raw_nbytes: int
    """Size in memory, once it has been loaded."""
    used_blocks: int = 0
    """Leading blocks that are loaded of it; 0: all."""
    last_hash: BlockHash | Literal[b""] = b""
    """Hash of the last of these; empty when all are."""

    @property
    def end_block(self) -> int:
        """First block after those that are loaded."""
        return self.start_block + (self.used_blocks or self.num_blocks)


Choose: TypeAlias = Callable[[Sequence[PlannedSegment]], tuple[int, PlanReason]]
"""Says how many of the stored segments that begin a prompt shall be loaded, from the first on, and why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Consecutive segments to load, in order. The first may begin inside the device prefix, but ends after it."""

    lease_id: int
    """0 when there is nothing to load, and so nothing to release."""
    segments: tuple[PlannedSegment, ...]
    reason: PlanReason
    scores: tuple[tuple[int, float], ...] = ()
    """(end block, hotness) of each known segment that the prompt begins with, in order, this use counted; two cuts of
    the same tokens both appear. `kvmanager.index.hotness`: scores stay comparable without being refreshed."""
    now_score: float = 0.0
    """Hotness of what was used once, now: for blocks of which nothing is known."""


@dataclass(slots=True)
class _Lease:
    replica: str
    made: float
    deadline: float
    copies: list[Copy]


class Planner:
    """Makes plans and keeps their leases."""

    def __init__(
        self, catalog: Catalog, counters: Counters, renewals: Renewals, blocks_per_segment: int, lease_s: float
    ) -> None:
        self._catalog = catalog
        self._counters = counters
        self._renewals = renewals
        self._blocks_per_segment = blocks_per_segment
        self._lease_s = lease_s
        self._leases: dict[int, _Lease] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap of when leases end, by their ids; of one that was released, until then."""
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def plan(
        self,
        now: float,
        replica: str,
        node: str,
        hashes: Sequence[BlockHash],
        device_blocks: int,
        choose: Choose | None = None,
    ) -> Plan:
        """Count one use of every known node that begins this prompt, and lease what shall be loaded of it.

        That is all that is stored unless ``choose`` says less. O(segments of the prompt), plus O(log n) for the heap
        entries of leaves.
        """
        plan = self._plan(now, replica, node, hashes, device_blocks, self._catalog.use, choose, used=True)
        counters = self._counters
        counters.plans += 1
        counters.prompt_blocks += len(hashes)
        counters.device_blocks += device_blocks
        for _, start, blocks, location, *_ in plan.segments:
            gained = start + blocks - max(start, device_blocks)
            if location.tier is Tier.CPU:
                counters.cpu_blocks += gained
            else:
                counters.redis_blocks += gained
        return plan

    def reserve(self, now: float, replica: str, node: str, hashes: Sequence[BlockHash]) -> Plan:
        """Lease what a directive shall load of a prompt: as `plan`, but nobody has asked, so nothing is counted."""
        return self._plan(now, replica, node, hashes, 0, lambda known: known.score)

    def release(self, lease_id: int) -> list[Copy]:
        """End a lease, if it has not ended yet; return the copies whose eviction waited for it."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        return [copy for copy in lease.copies if self._catalog.unlease(copy)]

    def extend(self, lease_id: int, seconds: float) -> None:
        """Let a lease end so much later; one that has ended is no error."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.deadline += seconds

    def expire(self, now: float) -> list[Copy]:
        """End the leases whose time is over; return the copies whose eviction waited for them. O(expired)."""
        freed: list[Copy] = []
        while self._ends and self._ends[0][0] <= now:
            _, lease_id = heappop(self._ends)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.deadline > now:
                heappush(self._ends, (lease.deadline, lease_id))  # it was extended
            elif lease is not None:
                self._counters.expired_leases += 1
                freed += self.release(lease_id)
        return freed

    def forget_replica(self, replica: str) -> list[Copy]:
        """End the leases of a replica that is gone; return the copies whose eviction waited for them. O(leases)."""
        orphaned = [lease_id for lease_id, lease in self._leases.items() if lease.replica == replica]
        return [copy for lease_id in orphaned for copy in self.release(lease_id)]

    def deepest_known(self, hashes: Sequence[BlockHash]) -> Node | None:
        """Return the known node that covers most leading blocks of a prompt. Its ancestors cover all before it."""
        nodes = self._catalog.trie.nodes
        reached = prefix_reach(hashes, self._blocks_per_segment, nodes.__contains__)
        return nodes[hashes[reached - 1]] if reached else None

    def deepest_stored(self, hashes: Sequence[BlockHash], tier: Tier | None = None) -> Node | None:
        """Return the node stored in a tier, or in any shared one, that covers most leading blocks of a prompt."""
        nodes = self._catalog.trie.nodes
        reached = prefix_reach(hashes, self._blocks_per_segment, lambda block: _is_stored(nodes.get(block), tier))
        return nodes[hashes[reached - 1]] if reached else None

    def stored_reach(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt any shared tier has, and a CPU tier: what reaches further, and of
        equals what is nearer, is greater.
        """
        ends = [self.deepest_stored(hashes, tier) for tier in (None, Tier.CPU)]
        return (ends[0].end_block if ends[0] else 0), (ends[1].end_block if ends[1] else 0)

    def oldest_s(self, now: float) -> float:
        """Return the age in seconds of the oldest lease, 0 without any."""
        oldest = next(iter(self._leases.values()), None)
        return 0.0 if oldest is None else now - oldest.made

    def _plan(
        self,
        now: float,
        replica: str,
        node: str,
        hashes: Sequence[BlockHash],
        device_blocks: int,
        visit: Callable[[Node], float],
        choose: Choose | None = None,
        used: bool = False,
    ) -> Plan:
        known = self.deepest_known(hashes)
        stored = self.deepest_stored(hashes)
        if used:
            self._renewals.used(now, stored)
        scores = _visit(known, stored, visit)
        now_score = self._catalog.clock.now
        chain: list[Node] = []
        copies: list[Copy] = []
        step = stored
        reason = PlanReason.DEVICE if stored else PlanReason.EVICTED if known else PlanReason.COLD
        while step is not None and step.end_block > device_blocks:
            copy = _nearest(step, node)
            if copy is None:  # it is being uprooted, and what lies behind it with it
                chain, copies, reason = [], [], PlanReason.EVICTED
            else:
                chain.append(step)
                copies.append(copy)
            step = step.parent
        if not chain:
            return Plan(0, (), reason, scores, now_score)
        chain.reverse()
        copies.reverse()
        segments = tuple(
            PlannedSegment(link.key, link.start_block, link.num_blocks, copy.store.location, copy.nbytes, link.nbytes)
            for link, copy in zip(chain, copies, strict=True)
        )
        count, reason = choose(segments) if choose else (len(segments), PlanReason.HIT)
        if not count:
            return Plan(0, (), reason, scores, now_score)
        for copy in copies[:count]:
            self._catalog.lease(copy)
        self._last_id += 1
        self._leases[self._last_id] = _Lease(replica, now, now + self._lease_s, copies[:count])
        heappush(self._ends, (now + self._lease_s, self._last_id))
        return Plan(self._last_id, segments[:count], reason, scores, now_score)


def _visit(known: Node | None, stored: Node | None, visit: Callable[[Node], float]) -> tuple[tuple[int, float], ...]:
    """Visit the ancestors of both nodes once, which part ways only after their last common cut.

    Returns their end blocks and what ``visit`` returned, their scores, ascending.
    """
    seen: list[tuple[int, float]] = []
    while known is not stored:
        if known is not None and (stored is None or known.end_block > stored.end_block):
            seen.append((known.end_block, visit(known)))
            known = known.parent
        elif stored is not None:
            seen.append((stored.end_block, visit(stored)))
            stored = stored.parent
    while known is not None:
        seen.append((known.start_block + known.num_blocks, visit(known)))
        known = known.parent
    seen.reverse()
    return tuple(seen)


def _is_stored(node: Node | None, tier: Tier | None) -> bool:
    if node is None:
        return False
    return any(copy.resident and tier in (None, copy.store.location.tier) for copy in node.all_copies())


def _nearest(node: Node, reader: str) -> Copy | None:
    """Return the RESIDENT copy that a process on node ``reader`` reads fastest: own CPU tier, another's, Redis."""
    only = node.copies
    if only is None or only.next is None:
        return only if only is not None and only.resident else None

    def distance(copy: Copy) -> tuple[bool, bool]:
        tier, holder = copy.store.location
        return tier is not Tier.CPU, holder != reader

    return min((copy for copy in node.all_copies() if copy.resident), key=distance, default=None)
