"""The manager: one object that answers what may be loaded, what shall be stored, and what must go.

Who calls: the manager's actor, from one thread, never re-entrantly. It passes the time (``now``, seconds on any clock
that does not jump; a step backwards is ignored) and carries out the returned directives in order. Everything happens in
memory at once; nothing here waits, and nothing on a request's path (`plan`, `release`, `offer`, `commit`, `abandon`,
the device reports, `deltas_since` without a gap) costs O(index).

This class only wires the parts together: `trie` and `nodes` (what is known), `catalog` (what is where), `plans`,
`saves`, `demotions`, `device_index`, `deltas`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

from kvmanager.catalog import Catalog, evictions
from kvmanager.config import ManagerConfig
from kvmanager.counters import Counters
from kvmanager.deltas import DeltaLog, Deltas, Event
from kvmanager.demotion_queue import DemotionQueue
from kvmanager.demotions import Demotion, Demotions
from kvmanager.device_index import DeviceIndex
from kvmanager.directives import Directive, evict
from kvmanager.hotness import HotnessClock
from kvmanager.keys import BlockHash, SegmentKey
from kvmanager.locations import REDIS, Location, Tier
from kvmanager.nodes import Copy
from kvmanager.plans import Plan, Planner
from kvmanager.policies import make_policy
from kvmanager.report import lookup_report, store_report
from kvmanager.saves import Offer, Saves
from kvmanager.segments import SegmentSpan
from kvmanager.trie import PrefixTrie

__all__ = ["KVManager", "ManagerConfig"]


class KVManager:
    """See the module. ``epoch``: a number that no other manager of this server ever had, e.g. random."""

    def __init__(self, config: ManagerConfig, epoch: int) -> None:
        self.epoch = epoch
        self._now = float("-inf")
        self._counters = Counters()
        self._clock = HotnessClock(config.half_life_requests)
        self._log = DeltaLog(epoch, config.max_deltas)
        self._trie = PrefixTrie(config.max_ghosts)
        self._queue = DemotionQueue(self._clock, self._counters, config.redis_min_uses)
        policy = partial(make_policy, config.eviction_policy)
        self._catalog = Catalog(self._trie, self._clock, self._log, policy, self._queue)
        self._planner = Planner(self._catalog, self._counters, config.blocks_per_segment, config.lease_s)
        self._saves = Saves(self._catalog, self._counters, config.blocks_per_segment, config.save_s)
        self._demotions = Demotions(self._catalog, self._queue, self._counters, config.cpu_high_water, config.save_s)
        self._devices = DeviceIndex()
        self._due: list[Copy] = []
        """Forgotten copies that no directive has named yet: the next method that returns directives does."""

    def set_budget(self, location: Location, nbytes: int) -> None:
        """Let a location hold ``nbytes``. Raises ValueError for a device, and for less than the location holds.

        O(index) when Redis gets its first bytes: what CPU tiers hold may have earned a copy there before it came.
        """
        store = self._catalog.store(location)
        if nbytes < store.used_bytes:
            raise ValueError(f"{location} holds {store.used_bytes} bytes, more than {nbytes}: clear its tier first")
        store.budget_bytes = nbytes
        if location == REDIS and nbytes:
            self._queue.open(self._trie.nodes.values())
        elif location == REDIS:
            self._queue.close()

    # Loading

    def plan(self, now: float, replica: str, node: str, hashes: Sequence[BlockHash], device_blocks: int = 0) -> Plan:
        """Say what ``replica`` on ``node`` may load for a prompt of which it holds ``device_blocks`` leading blocks.

        Counts one request, and one use of every known segment that the prompt begins with. The segments handed out stay
        where they are until `release` or ``lease_s`` seconds. O(segments of the prompt).
        """
        self._advance(now)
        self._clock.tick()
        return self._planner.plan(self._now, replica, node, hashes, device_blocks)

    def release(self, lease_id: int) -> None:
        """End a plan's lease; one that has ended already is no error. What waited for it, `expire` will evict."""
        self._due += self._planner.release(lease_id)

    # Saving

    def offer(
        self, now: float, replica: str, location: Location, spans: Sequence[SegmentSpan], nbytes: Sequence[int]
    ) -> Offer:
        """Say which of the segments that ``replica`` has computed shall be stored at ``location``, and reserve them.

        Chosen are those that are neither there nor on their way, whose parent is, and for which there is room after
        evicting colder leaves. The reservation ends by `commit`, by `abandon`, or after ``save_s`` seconds.
        """
        due = self.expire(now)  # their room is free already, so their evictions must come before these segments
        offer = self._saves.offer(self._now, replica, self._catalog.store(location), spans, nbytes)
        self._trie.forget_coldest_ghosts()
        return replace(offer, evict=due + offer.evict)

    def commit(
        self, now: float, location: Location, keys: Sequence[SegmentKey], nbytes: Sequence[int]
    ) -> list[SegmentKey]:
        """Note that the tier at ``location`` owns the complete bytes of ``keys``; return those it shall keep.

        Plans contain a segment from now on, or, if its parent is still being stored, from the parent's commit on.
        """
        self._advance(now)
        return self._saves.commit(self._now, self._catalog.store(location), keys, nbytes)

    def adopt(
        self, now: float, location: Location, spans: Sequence[SegmentSpan], nbytes: Sequence[int]
    ) -> list[SegmentKey]:
        """Index what the tier at ``location`` holds without having been asked to; return the keys it shall keep.

        For tiers that have outlived a manager. New nodes start with one use; nothing is evicted to make room.
        """
        self._advance(now)
        accepted = self._saves.adopt(self._now, self._catalog.store(location), spans, nbytes)
        kept = set(accepted)
        self._due = [copy for copy in self._due if copy.store.location != location or copy.node.key not in kept]
        self._trie.forget_coldest_ghosts()
        return accepted

    def abandon(self, save_id: int) -> None:
        """Give back what of a save is not committed; one that has ended already is no error.

        What was committed behind it and has lost its chain, `expire` will evict.
        """
        self._due += self._saves.abandon(save_id)
        self._trie.forget_coldest_ghosts()

    def dropped(self, now: float, location: Location, keys: Iterable[SegmentKey]) -> tuple[Directive, ...]:
        """Note that ``location`` no longer has ``keys``; order the eviction of what cannot be reached without them."""
        self._advance(now)
        store = self._catalog.store(location)
        nodes = [node for key in keys if (node := self._trie.nodes.get(key)) is not None]
        freed: list[Copy] = []
        for node in sorted(
            nodes, key=lambda node: node.start_block, reverse=True
        ):  # no order to evict what is lost too
            copy = node.copy_at(store)
            if copy is not None:
                self._counters.dropped_segments += 1
                freed += self._catalog.uproot(copy, bytes_lost=True)
        return self._evict(freed)

    # Redis

    def next_demotion(self, now: float, most_bytes: int) -> Demotion | None:
        """Say which segments shall be copied from a CPU tier to Redis now, and keep them there until `finish_demotion`.

        At most ``most_bytes`` in all, or one larger segment. None: nothing for now; to be asked again after a commit,
        a plan or an `expire`. Several demotions may be under way; each ends by itself after ``save_s`` seconds.
        """
        self._end_overdue(now)
        demotion = self._demotions.next(self._now, most_bytes)
        if demotion is None:
            return None
        # What Redis is still to free comes first, for the same segments may be written again now.
        others = [copy for copy in self._due if copy.store.location != REDIS]
        self._due = [copy for copy in self._due if copy.store.location == REDIS]
        due, self._due = self._evict([]), others
        return replace(demotion, evict=due + demotion.evict)

    def finish_demotion(self, now: float, demotion_id: int, stored_keys: Sequence[SegmentKey]) -> tuple[Directive, ...]:
        """Note that Redis has ``stored_keys`` of a demotion and that nobody works on the rest; order what is due.

        For a demotion that has ended already, the eviction of what Redis holds without the index knowing is due.
        """
        self._end_overdue(now)
        freed, strays = self._demotions.finish(demotion_id, stored_keys)
        due = {copy.node.key for copy in self._due if copy.store.location == REDIS}
        strays = [key for key in strays if key not in due]
        return self._evict(freed) + ((evict(REDIS, tuple(strays)),) if strays else ())

    def relieve(self, now: float) -> tuple[Directive, ...]:
        """Order CPU tiers above their high-water mark to free the coldest segments that Redis has, and what is due."""
        self._advance(now)
        relieved = self._demotions.relieve()
        self._counters.evicted_segments += len(relieved)
        return self._evict([]) + evictions(relieved)

    def promote(self, now: float, replica: str, location: Location, keys: Sequence[SegmentKey]) -> Offer:
        """Say which of ``keys``, stored at Redis, shall be copied to the CPU tier ``location``, and reserve them there.

        The rules are those of `offer`; it ends by `commit`, by `abandon`, or after ``save_s`` seconds.
        """
        due = self.expire(now)
        offer = self._saves.promote(self._now, replica, self._catalog.store(location), keys)
        self._trie.forget_coldest_ghosts()
        return replace(offer, evict=due + offer.evict)

    # What devices hold

    def device_stored(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Note that a replica's device pool now holds these blocks."""
        if new := self._devices.stored(replica, hashes):
            self._log.append(("dev+", replica, new))

    def device_removed(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Note that a replica's device pool no longer holds these blocks."""
        if gone := self._devices.removed(replica, hashes):
            self._log.append(("dev-", replica, gone))

    def device_cleared(self, replica: str) -> None:
        """Note that a replica's device pool is empty."""
        if self._devices.forget(replica):
            self._log.append(("dev0", replica))

    # Losses and housekeeping

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone: its device, its leases and its unfinished saves. O(leases + saves)."""
        self.device_cleared(replica)
        self._due += self._planner.forget_replica(replica) + self._saves.forget_replica(replica)
        self._trie.forget_coldest_ghosts()

    def forget_holder(self, location: Location) -> None:
        """Note that a location is gone with all it held; its budget becomes zero. O(index).

        Demotions and promotions under way may go on, but nothing is committed at a location that is gone.
        """
        store = self._catalog.store(location)
        for copy in reversed(self._catalog.copies_at(store)):
            self._catalog.uproot(copy, bytes_lost=True)
        self._due = [copy for copy in self._due if copy.store is not store]
        self.set_budget(location, 0)
        self._trie.forget_coldest_ghosts()

    def clear(self, tiers: set[Tier]) -> tuple[Directive, ...]:
        """Order whole tiers to be emptied; leased segments follow when their lease ends. Hotness stays. O(index)."""
        freed: list[Copy] = []
        for location, store in self._catalog.stores.items():
            if location.tier in tiers:
                for copy in reversed(self._catalog.copies_at(store)):
                    freed += self._catalog.uproot(copy, bytes_lost=False)
        directives = self._evict(freed)
        if Tier.DEVICE in tiers:
            directives += tuple(evict(Location(Tier.DEVICE, replica), ()) for replica, _ in self._devices.replicas())
        return directives

    def expire(self, now: float) -> tuple[Directive, ...]:
        """End the leases and saves whose time is over, and order all evictions that are due.

        To be called every second or so. O(expired).
        """
        self._end_overdue(now)
        return self._evict([])

    # Reports

    def deltas_since(self, seq: int, limit: int) -> Deltas:
        """Return at most ``limit`` placement events after number ``seq``; a snapshot, O(index), if some are lost."""
        return self._log.since(seq, limit, self._placement)

    def lookup(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """Describe what is known of a prompt, in blocks, without counting a use."""
        return lookup_report(self._catalog, self._planner, self._devices, self._clock, hashes)

    def stats(self, now: float) -> dict[str, Any]:
        """Return sizes and counters, for metrics and the control API. O(locations)."""
        self._advance(now)
        return {
            "nodes": len(self._trie.nodes),
            "ghosts": self._trie.num_ghosts,
            "locations": [store_report(store) for store in self._catalog.stores.values()],
            "leases": len(self._planner),
            "reservations": len(self._saves),
            "demotions": len(self._demotions),
            "demotion_queue": len(self._queue),
            "oldest_lease_s": self._planner.oldest_s(self._now),
            "oldest_reservation_s": self._saves.oldest_s(self._now),
            "last_delta": self._log.last,
            "counters": asdict(self._counters),
        }

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)

    def _end_overdue(self, now: float) -> None:
        self._advance(now)
        self._due += self._planner.expire(self._now)
        self._due += self._saves.expire(self._now) + self._demotions.expire(self._now)

    def _evict(self, freed: list[Copy]) -> tuple[Directive, ...]:
        # Losses of different days meet here: a parent's demotion may have ended before its child's.
        due, self._due = sorted(self._due + freed, key=lambda copy: copy.node.start_block, reverse=True), []
        self._counters.evicted_segments += len(due)
        self._trie.forget_coldest_ghosts()
        return evictions(due)

    def _placement(self) -> Iterable[Event]:
        devices: Iterable[Event] = (("dev+", replica, list(held)) for replica, held in self._devices.replicas())
        return chain(self._catalog.placement(), devices)
