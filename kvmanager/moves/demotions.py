"""Demotions: which segments of a CPU tier are copied to Redis, and which leave the CPU tier once they are there.

Three reasons to copy. *Ordered*: a client wants it there now (`order`); that goes first. *Earned*: the segment was used
often enough (`kvmanager.index.demotion_queue`). *Room*: a CPU tier is above its high-water mark, its coldest leaf is
next to go, and Redis lacks it. These two take turns, so that neither starves the other. Each partition of a tier
(`kvmanager.index.stores`) has a mark of its own, the same share of its budget. What a segment continues goes with it
where Redis lacks that too: each location keeps whole chains.

Life of a demotion: `next` reserves room at Redis, as much as the copies take in the CPU tier, and leases those; the
tier writes them, perhaps coded; `finish` commits what Redis has now, in the size that it has there. A demotion that
is not finished ends by time. What it named and the index does not expect at Redis then is ordered evicted there: a
write whose answer was lost may have happened. Copies leave the CPU tier only through `relieve`, coldest first, and only
while Redis has them.

Invariants: no segment is in two demotions, for the first has reserved it; the copies of a demotion in flight are
leased, and whatever ends it ends the leases. ``now`` never goes backwards, so demotions expire in the order in which
they were made. One thread.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.demotion_queue import DemotionQueue, Ordered
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.index.stores import Partition, Store
from kvmanager.moves.directives import Evict
from kvmanager.moves.due_evictions import evictions
from kvmanager.moves.leases import Numbers
from kvmanager.segments.keys import SegmentKey

MOST_CONSIDERED = 256
"""Entries of the queue that one call looks at: it holds up requests meanwhile. More wait for the next call."""

MOST_RELIEVED = 1000
"""Copies that one call of `relieve` evicts: some 25 ms. A tier that was full when Redis came has a tenth to give up."""


@dataclass(frozen=True, slots=True)
class Demotion:
    """An order: first carry out ``evict``, then copy ``keys`` from ``source`` to Redis, then report what was stored."""

    demotion_id: int
    source: Location
    """A CPU tier."""
    keys: tuple[SegmentKey, ...]
    """Parents first."""
    nbytes: tuple[int, ...]
    """Size of each in the CPU tier, header included: what is reserved for it."""
    evict: tuple[Evict, ...]
    """What leaves Redis for it."""


@dataclass(slots=True)
class _Batch:
    sources: list[Copy] = field(default_factory=list)
    targets: list[Copy] = field(default_factory=list)
    """At Redis, one for each source."""
    victims: list[Copy] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class _InFlight:
    deadline: float
    batch: _Batch
    makes_room: bool


class _Added(Enum):
    WHOLE = "all of the chain that Redis lacks is in the batch"
    FULL = "the batch has no room for the rest of the chain"
    REFUSED = "Redis has no room for the rest of the chain"


class Demotions:
    """Chooses what is copied to Redis and keeps the books of what is on its way."""

    def __init__(
        self,
        catalog: Catalog,
        queue: DemotionQueue,
        counters: Counters,
        cpu_high_water: float,
        deadline_s: float,
        numbers: Numbers,
    ) -> None:
        self.catalog = self._catalog = catalog
        self._queue = queue
        self._ordered = Ordered()
        self._counters = counters
        self._cpu_high_water = cpu_high_water
        self._deadline_s = deadline_s
        self._in_flight: dict[int, _InFlight] = {}
        self._numbers = numbers
        self._last_made_room = False

    def __len__(self) -> int:
        return len(self._in_flight)

    def order(self, nodes: Iterable[Node]) -> None:
        """Copy these segments before all others, parents first; at most `MOST_ORDERED` wait.

        O(nodes), and each times the tenants that have ordered where those are full.
        """
        if self._redis() is not None:
            self._ordered.add(nodes)

    def is_ordered(self, key: SegmentKey) -> bool:
        """Return whether a segment waits because it was ordered."""
        return key in self._ordered.waiting

    def next(self, now: float, most_bytes: int) -> Demotion | None:
        """Reserve the next segments to copy, ``most_bytes`` in all or a single larger one; None if there are none now.

        Calls without anything in between come to None. O(log n) per segment and victim, at most `MOST_CONSIDERED`
        entries of the queue and the chain of each.
        """
        redis = self._redis()
        if redis is None:
            return None
        if self._ordered.waiting:
            batch = self._earned(redis, most_bytes, self._ordered)
            if batch.targets:
                return self._depart(_InFlight(now + self._deadline_s, batch, makes_room=False))
        for makes_room in (not self._last_made_room, self._last_made_room):
            batch = self._coldest(redis, most_bytes) if makes_room else self._earned(redis, most_bytes, self._queue)
            if batch.targets:
                self._last_made_room = makes_room
                return self._depart(_InFlight(now + self._deadline_s, batch, makes_room))
        return None

    def finish(self, demotion_id: int, stored: Mapping[SegmentKey, int]) -> tuple[list[Copy], list[SegmentKey]]:
        """Commit what Redis has now, by key the bytes that it takes there, and end the demotion, if it has not ended.

        What takes more than was reserved is not committed but evicted. Returns forgotten copies and, for a demotion
        that has ended already, keys to be evicted; children first.
        """
        flight = self._in_flight.pop(demotion_id, None)
        if flight is None:
            strays = [key for key in reversed(list(stored)) if self._is_stray(key)]
            self._counters.stray_segments += len(strays)
            return [], strays
        for target in flight.batch.targets:
            nbytes = stored.get(target.node.key)
            if nbytes is not None and nbytes <= target.nbytes and target.state is CopyState.RESERVED and target.upholds:
                self._catalog.commit(target, nbytes)
                self._counters.demoted_segments += 1
        return self._land(flight), []

    def expire(self, now: float) -> list[Copy]:
        """End the demotions whose time is over; return the forgotten copies to be evicted. O(expired)."""
        freed: list[Copy] = []
        while self._in_flight:
            demotion_id, flight = next(iter(self._in_flight.items()))
            if flight.deadline > now:
                break
            self._counters.expired_demotions += 1
            del self._in_flight[demotion_id]
            freed += self._land(flight)
        return freed

    def relieve(self) -> list[Copy]:
        """Take the coldest leaves that Redis has out of CPU tiers above their mark; return them, to be evicted.

        Stops at a leaf that Redis lacks: that has to be copied first. At most `MOST_RELIEVED` in a call; to be called
        again until it returns none. O(partitions), and O(log n) per segment.
        """
        redis = self._redis()
        freed: list[Copy] = []
        if redis is None:
            return freed
        left = MOST_RELIEVED
        for partition in self._cpu_partitions():
            while left and self._excess(partition) > 0 and (victim := partition.policy.victim()) is not None:
                kept = victim.node.copy_at(redis)
                if kept is None or not kept.resident:
                    break
                left -= 1
                freed += self._catalog.uproot(victim, bytes_lost=False, evicted=True)
        self._counters.relieved_segments += len(freed)
        return freed

    def _is_stray(self, key: SegmentKey) -> bool:
        """Return whether the index does not expect ``key`` at Redis.

        Without Redis no key is a stray: what it holds is indexed again when it is back.
        """
        redis = self._redis()
        node = self._catalog.trie.nodes.get(key)
        if redis is None:
            return False
        there = None if node is None else node.copy_at(redis)
        if there is not None:
            self._catalog.may_have_come(there)
        return there is None

    def _redis(self) -> Store | None:
        redis = self._catalog.stores.get(REDIS)
        return redis if redis is not None and redis.budget_bytes else None

    def _cpu_partitions(self) -> Iterator[Partition]:
        for location, store in self._catalog.stores.items():
            if location.tier is Tier.CPU:
                yield from store.partitions()

    def _excess(self, partition: Partition) -> float:
        return partition.used_bytes - self._cpu_high_water * partition.budget_bytes

    def _coldest(self, redis: Store, most_bytes: int) -> _Batch:
        """Choose the coldest leaves of a partition above its mark, as many as bring it below once they are gone."""
        batch = _Batch()
        for partition in self._cpu_partitions():
            leaving = sum(
                flight.batch.nbytes
                for flight in self._in_flight.values()
                if flight.makes_room and flight.batch.sources[0].partition is partition
            )
            excess = self._excess(partition) - leaving
            while batch.nbytes < excess and (leaf := partition.policy.victim()) is not None:
                if leaf.node.copy_at(redis) is not None or not leaf.resident:
                    break  # `relieve` can evict it, or could soon; or it is on its way out
                added = self._add_chain(redis, leaf, batch, most_bytes)
                if added is _Added.REFUSED and partition.refused_leaf != leaf.node.key:
                    partition.refused_leaf = leaf.node.key
                    self._counters.refused_demotions += 1
                if added is not _Added.WHOLE:
                    break
            if batch.targets:
                break
        return batch

    def _earned(self, redis: Store, most_bytes: int, queue: "DemotionQueue | Ordered") -> _Batch:
        """Choose the first of a queue, as long as they lie in one CPU tier."""
        batch = _Batch()
        for _ in range(min(len(queue), MOST_CONSIDERED)):
            node = self._catalog.trie.nodes.get(queue.first())
            source = None if node is None or node.copy_at(redis) is not None else _at_cpu(node)
            if source is not None:
                if batch.sources and batch.sources[0].store is not source.store:
                    break
                added = self._add_chain(redis, source, batch, most_bytes)
                if added is _Added.FULL:
                    break
                self._counters.refused_demotions += added is _Added.REFUSED
            queue.pop()
        return batch

    def _add_chain(self, redis: Store, leaf: Copy, batch: _Batch, most_bytes: int) -> _Added:
        """Reserve, parents first, what Redis lacks of the chain that ends with ``leaf``.

        Only colder segments leave Redis for it, even if its policy lets in all that comes, as LRU does: else the
        coldest leaves of two CPU tiers could push each other out of Redis without end.
        """
        chain: list[Copy] = []
        copy: Copy | None = leaf
        while copy is not None:
            if not copy.resident:  # on its way out, and the leaf with it
                return _Added.REFUSED
            chain.append(copy)
            if self._catalog.upheld(copy.node, redis):
                break
            parent = copy.node.parent
            copy = None if parent is None else parent.copy_at(leaf.store)
        for copy in reversed(chain):
            if batch.targets and batch.nbytes + copy.nbytes > most_bytes:
                return _Added.FULL
            if copy.node.copy_at(redis) is not None:  # its eviction there waits for a lease
                return _Added.REFUSED
            reserved = self._catalog.reserve(redis, copy.node, copy.nbytes, for_hotter=True)
            if reserved is None:
                return _Added.REFUSED
            self._catalog.lease(copy)
            target, victims = reserved
            batch.sources.append(copy)
            batch.targets.append(target)
            batch.victims += victims
            batch.nbytes += copy.nbytes
        return _Added.WHOLE

    def _depart(self, flight: _InFlight) -> Demotion:
        batch = flight.batch
        demotion_id = self._numbers.next()
        self._in_flight[demotion_id] = flight
        self._counters.evicted_segments += len(batch.victims)
        return Demotion(
            demotion_id,
            batch.sources[0].store.location,
            tuple(copy.node.key for copy in batch.targets),
            tuple(copy.nbytes for copy in batch.targets),
            evictions(batch.victims),
        )

    def _land(self, flight: _InFlight) -> list[Copy]:
        """End the reservations and leases of a demotion; return the forgotten copies to be evicted, children first."""
        freed: list[Copy] = []
        for target in reversed(flight.batch.targets):
            if target.state is CopyState.RESERVED:
                freed += self._catalog.uproot(target, bytes_lost=True)
            if not self._catalog.may_have_come(target) and self._is_stray(target.node.key):
                freed.append(target)
        freed += [source for source in reversed(flight.batch.sources) if self._catalog.unlease(source)]
        return freed


def _at_cpu(node: Node) -> Copy | None:
    """Return a RESIDENT copy in a CPU tier: whole chains lie there."""
    at_cpu = (copy for copy in node.all_copies() if copy.store.location.tier is Tier.CPU and copy.resident)
    return next(at_cpu, None)
