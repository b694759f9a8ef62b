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
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.moves.renewals import Renewals
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import join_marks


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
    """Hash of the last of these, as the prompt has it; empty when that is the key."""

    @property
    def end_block(self) -> int:
        """First block after those that are loaded."""
        return self.start_block + (self.used_blocks or self.num_blocks)

    @property
    def read_bytes(self) -> int:
        """What a load reads of it: of a CPU tier the part that is used, of Redis, where it may be coded, all."""
        if self.used_blocks and self.location.tier is Tier.CPU:
            return self.nbytes * self.used_blocks // self.num_blocks
        return self.nbytes


Choose: TypeAlias = Callable[[Sequence[PlannedSegment]], tuple[int, PlanReason]]
"""Says how many of the stored segments that begin a prompt shall be loaded, from the first on, and why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments to load, in order: each adds the blocks from the end of the one before it to its own, and may begin
    before them. The first may begin inside the device prefix, but ends after it."""

    lease_id: int
    """0 when there is nothing to load, and so nothing to release."""
    segments: tuple[PlannedSegment, ...]
    reason: PlanReason
    scores: tuple[tuple[int, float], ...] = ()
    """(end block, hotness) of each known segment that holds leading blocks of the prompt, in order, this use counted:
    of the stored ones, and of those known beyond them; the end is that of the prompt's part. Scores stay comparable
    without being refreshed (`kvmanager.index.hotness`)."""
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
        """Count one use of every known node that this prompt finds, and lease what shall be loaded of it.

        That is all that is stored unless ``choose`` says less. O(segments of the prompt), plus O(log n) for the heap
        entries of leaves.
        """
        plan = self._plan(now, replica, node, hashes, device_blocks, self._catalog.use, choose, used=True)
        counters = self._counters
        counters.plans += 1
        counters.prompt_blocks += len(hashes)
        counters.device_blocks += device_blocks
        reached = device_blocks
        ends = [end for end, _ in plan.scores if end > reached]  # the first ones are the planned segments'
        for segment, end in zip(plan.segments, ends, strict=False):
            if segment.location.tier is Tier.CPU:
                counters.cpu_blocks += end - reached
            else:
                counters.redis_blocks += end - reached
            reached = end
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

    def known_path(self, hashes: Sequence[BlockHash], reader: str = "") -> tuple[list[Node], list[int]]:
        """Return the known segments that hold a prompt's leading blocks, and where each one's part of them ends.

        Stored ones first, as a plan for node ``reader`` finds them, and then what is known beyond them.
        """
        marks = join_marks(hashes)
        path, ends, _ = self._stored_path(marks, reader)
        begin = ends[-1] if ends else 0
        known, known_ends, _ = self._catalog.trie.runs.path(marks, self._blocks_per_segment, _known, begin)
        return path + known, ends + known_ends

    def reach(self, hashes: Sequence[BlockHash], tier: Tier | None = None) -> int:
        """Return how many leading blocks of a prompt are stored in a tier, or in any shared one."""
        _, ends, _ = self._stored_path(join_marks(hashes), tier=tier)
        return ends[-1] if ends else 0

    def stored_reach(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt any shared tier has, and a CPU tier: what reaches further, and of
        equals what is nearer, is greater.
        """
        return self.reach(hashes), self.reach(hashes, Tier.CPU)

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
        marks = join_marks(hashes)
        path, ends, copies = self._stored_path(marks, node)
        stored_to = ends[-1] if ends else 0
        known, known_ends, _ = self._catalog.trie.runs.path(marks, self._blocks_per_segment, _known, stored_to)
        if used:
            self._renewals.used(now, path)
        found = zip(reversed(path + known), reversed(ends + known_ends), strict=True)
        scores = [(end, visit(link)) for link, end in found]  # the deepest first
        scores.reverse()
        now_score = self._catalog.clock.now
        first = sum(end <= device_blocks for end in ends) if device_blocks else 0
        if first == len(path):
            reason = PlanReason.DEVICE if path else PlanReason.EVICTED if known else PlanReason.COLD
            return Plan(0, (), reason, tuple(scores), now_score)
        segments = [
            PlannedSegment(
                link.key, link.start_block, link.num_blocks, copy.partition.store.location, copy.nbytes, link.nbytes
            )
            for link, copy in zip(path[first:], copies[first:], strict=True)
        ]
        for number, segment in enumerate(segments):
            used_blocks = ends[first + number] - segment.start_block
            last_hash = hashes[ends[first + number] - 1]
            if SegmentKey(last_hash) != segment.key:  # of a whole one if another sequence has its marks: it is refused
                segments[number] = segment._replace(used_blocks=used_blocks, last_hash=last_hash)
        count, reason = choose(segments) if choose else (len(segments), PlanReason.HIT)
        if not count:
            return Plan(0, (), reason, tuple(scores), now_score)
        leased = copies[first : first + count]
        for copy in leased:
            self._catalog.lease(copy)
        self._last_id += 1
        self._leases[self._last_id] = _Lease(replica, now, now + self._lease_s, leased)
        heappush(self._ends, (now + self._lease_s, self._last_id))
        return Plan(self._last_id, tuple(segments[:count]), reason, tuple(scores), now_score)

    def _stored_path(
        self, marks: bytes, reader: str = "", tier: Tier | None = None
    ) -> tuple[list[Node], list[int], list[Copy]]:
        """Return the stored segments that hold a prompt's leading blocks, where each one's part ends, and their copies.

        ``marks`` are those of the prompt's blocks. The copies are those that a process on node ``reader`` reads
        fastest; with a ``tier``, only its own count.
        """

        def nearest(node: Node) -> Copy | None:
            only = node.copies
            if only is None:
                return None
            if only.next is None and tier is None:
                # `only.resident`, without the call: this runs once for each segment of a prompt
                return only if only.state is CopyState.RESIDENT and not only.share.retired else None
            found = (copy for copy in node.all_copies() if copy.resident and tier in (None, copy.store.location.tier))
            return min(found, key=distance, default=None)

        def distance(copy: Copy) -> int:
            at, holder = copy.store.location
            return 2 if at is not Tier.CPU else holder != reader

        return self._catalog.trie.runs.path(marks, self._blocks_per_segment, nearest, rank=lambda copy: -distance(copy))


def _known(node: Node) -> Node:
    """All that is known counts."""
    return node
