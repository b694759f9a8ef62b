"""The manager: one object that answers what may be loaded, what to store, and what must go.

The caller is the manager's actor, in one thread, never re-entrantly. It passes the time (``now``, seconds on any clock
that does not jump; a step backwards is ignored) and carries out the returned directives in order. Everything happens in
memory at once; nothing here waits, and nothing on a request's path (`plan`, `release`, `offer`, `commit`, `abandon`,
the device reports, `deltas_since`) costs O(index); what does is done in slices (`kvmanager.index.sweeps`, `snapshots`).

This class holds no rule of its own. The rules are in its parts (`kvmanager.manager_parts`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvmanager.config import ManagerConfig
from kvmanager.eviction.pins import PinReport
from kvmanager.index.deltas import Deltas, Position
from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.index.nodes import Copy
from kvmanager.index.snapshots import deltas_since
from kvmanager.manager_parts import ManagerParts
from kvmanager.moves.cuts import cut_sequence
from kvmanager.moves.demotions import Demotion
from kvmanager.moves.directives import Evict
from kvmanager.moves.due_evictions import evictions
from kvmanager.moves.plan import Plan, PlanQuery
from kvmanager.moves.plan_draft import PlanChoice, PlanExtension
from kvmanager.moves.saves import Offer
from kvmanager.report import lookup_report, manager_report, tenant_report
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import SegmentSpan

__all__ = ["KVManager", "ManagerConfig"]


class KVManager:
    """See the module. ``epoch``: a number that no other manager of this server ever had, e.g. random. ``policy``
    makes eviction policies in place of the configured one. ``extensions``: of plans, in the order of asking.

    Raises ValueError for an eviction policy that is not known or cannot be made.
    """

    def __init__(
        self,
        config: ManagerConfig,
        epoch: int,
        policy: Callable[[PolicySetting], EvictionPolicy] | None = None,
        extensions: Sequence[PlanExtension] = (),
    ) -> None:
        self.epoch = epoch
        self._now = float("-inf")
        self._parts = parts = ManagerParts(config, epoch, policy, extensions)
        self._catalog, self._trie, self._due, self._planner = parts.catalog, parts.trie, parts.due, parts.planner
        self._search = parts.search
        self._leases, self._saves, self._demotions = parts.leases, parts.saves, parts.demotions
        self._pins, self._quotas, self._devices = parts.pins, parts.quotas, parts.devices
        self.views, self.orders = parts.views, parts.orders  # what people see of the index, and order of a prompt
        self.offloads = parts.offloads  # what devices hold and no shared tier has; for reading only
        self.renewals = parts.renewals  # what Redis is to keep from expiring, and what the index says of it
        self.forms = parts.forms  # of what Redis has: for the parts that commit or adopt there

    def set_budget(self, location: Location, nbytes: int) -> None:
        """Let a location hold ``nbytes``. Raises ValueError for a device, and for less than the location holds.

        When Redis gets its first bytes, `sweep` looks for what CPU tiers hold that has earned a copy there before.
        """
        store = (self._catalog.open if nbytes or location == REDIS else self._catalog.store)(location)
        if nbytes < store.used_bytes:
            raise ValueError(f"{location} holds {store.used_bytes} bytes, more than {nbytes}: clear its tier first")
        store.set_budget(nbytes)
        self._quotas.divided(store)
        if location == REDIS and nbytes:
            survey = self._parts.queue.open(self._trie.nodes.values())
            if survey is not None:
                self._catalog.sweeps.begin(survey)
                self._due.add(self._catalog.sweeps.step())
        elif location == REDIS:
            self._parts.queue.close()

    def set_quotas(self, tier: Tier, quotas: Mapping[str, int]) -> None:
        """Set the quotas of tenants (by tag): bytes of every location of a tier, now and later.

        Replaces the quotas of the tier; tenants without one share what is left. What no longer fits is ordered evicted
        by the next calls of `expire`, coldest first. A location that comes later with less than all quotas shares it
        out in proportion. Raises ValueError, and changes nothing, for quotas that exceed the budget of a location.
        O(segments of the tier).
        """
        self._quotas.set(tier, quotas)

    # Loading

    def plan(self, now: float, replica: str, node: str, query: PlanQuery, choice: PlanChoice | None = None) -> Plan:
        """Say what ``replica`` on ``node`` should load for a prompt.

        All that is stored unless ``choice`` says less (`kvmanager.loading.load_choice`). Counts one request, and one
        use of every known segment that the prompt begins with, loaded or not. The segments handed out stay where they
        are until `release` or ``lease_s`` seconds. O(segments of the prompt).

        Where more is stored under the query's exact hashes, or as much and nearer, the whole plan is about them, and
        the keys in it are theirs.

        What extensions bring in addition (`kvmanager.moves.plan_draft`) is used too, and all is under one lease.
        """
        self._advance(now)
        self._parts.clock.tick()
        if self._catalog.reuse is not None:
            self._catalog.reuse.request(len(query.hashes))
        return self._planner.plan(self._now, replica, node, query, choice)

    def reserve(self, now: float, replica: str, node: str, hashes: Sequence[BlockHash]) -> Plan:
        """Lease what a directive will load to ``replica``, as `plan` would, but count no use: no request asked."""
        self._advance(now)
        return self._planner.reserve(self._now, replica, node, hashes)

    def known_ends(self, hashes: Sequence[BlockHash]) -> list[SegmentKey]:
        """Return the last ones of a prompt's known segments: with all that they follow on, what is known of it."""
        return self._search.known_ends(hashes)

    def known_states(self, hashes: Sequence[BlockHash]) -> dict[int, SegmentKey]:
        """Return the known states of a prompt (`ChainSearch.known_states`)."""
        return self._search.known_states(hashes)

    def stored_blocks(self, sequences: Iterable[Sequence[BlockHash]]) -> list[int]:
        """Return how many leading blocks of each sequence a shared tier has. Counts no use. O(segments of all)."""
        return [self._search.reach(hashes) for hashes in sequences]

    def tenant_of(self, key: SegmentKey) -> str:
        """Return the tag of the tenant that a known segment belongs to; empty: none, or not known."""
        node = self._trie.nodes.get(key)
        return "" if node is None else node.tenant

    def extend_lease(self, lease_id: int, seconds: float) -> None:
        """Let a plan's lease end ``seconds`` later, for its load may take as long. O(1)."""
        self._leases.extend(lease_id, seconds)

    def release(self, lease_id: int) -> None:
        """End a plan's lease; one that has ended already is no error. What waited for it, `expire` will evict."""
        self._due.add(self._leases.release(lease_id))

    # Saving

    def cut(
        self,
        location: Location,
        hashes: Sequence[BlockHash],
        first_block: int,
        end_block: int,
        num_prompt_blocks: int,
        tenant: str = "",
    ) -> list[SegmentSpan]:
        """Cut what a replica has of a sequence, blocks ``[first_block, end_block)``, into segments for ``location``.

        ``hashes`` begin at block 0. Raises ValueError when the range does not lie in them. O(blocks).
        """
        store, most = self._catalog.store(location), self._parts.blocks_per_segment
        return cut_sequence(self._trie, store, hashes, first_block, end_block, most, num_prompt_blocks, tenant)

    def offer(
        self, now: float, replica: str, location: Location, spans: Sequence[SegmentSpan], nbytes: Sequence[int]
    ) -> Offer:
        """Say which of the segments that ``replica`` has computed to store at ``location``, and reserve them.

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
        """Note that the tier at ``location`` owns the complete bytes of ``keys``; return those it should keep.

        Plans contain a segment from now on, or, if its parent is still being stored, from the parent's commit on.
        """
        self._advance(now)
        return self._saves.commit(self._now, self._catalog.store(location), keys, nbytes)

    def adopt(
        self,
        now: float,
        location: Location,
        spans: Sequence[SegmentSpan],
        nbytes: Sequence[int],
        raw_nbytes: Sequence[int] | None = None,
    ) -> list[SegmentKey]:
        """Index what the tier at ``location`` holds without having been asked to; return the keys it should keep.

        For tiers that have outlived a manager. ``raw_nbytes``: what each would take in a CPU tier; None: as much as
        here. New nodes start with one use; nothing is evicted to make room.
        """
        self._advance(now)
        store = self._catalog.store(location)
        accepted = self._saves.adopt(self._now, store, spans, nbytes, nbytes if raw_nbytes is None else raw_nbytes)
        self._due.drop(location, set(accepted))
        self._trie.forget_coldest_ghosts()
        return accepted

    def abandon(self, save_id: int) -> None:
        """Give back what of a save is not committed; one that has ended already is no error.

        What was committed behind it and has lost its chain, `expire` will evict.
        """
        self._due.add(self._saves.abandon(save_id))
        self._trie.forget_coldest_ghosts()

    def dropped(self, now: float, location: Location, keys: Iterable[SegmentKey]) -> tuple[Evict, ...]:
        """Note that ``location`` no longer has ``keys``; order the eviction of what cannot be reached without them."""
        self._advance(now)
        store = self._catalog.store(location)
        dropped, freed = self._catalog.drop(store, keys)
        self._parts.counters.dropped_segments += dropped
        return self._evict(freed)

    # Redis

    def next_demotion(self, now: float, most_bytes: int) -> Demotion | None:
        """Say which segments to copy from a CPU tier to Redis now, and keep them there until `finish_demotion`.

        At most ``most_bytes`` in all, or one larger segment. None: nothing for now; to be asked again after a commit,
        a plan or an `expire`. Several demotions may be under way; each ends by itself after ``save_s`` seconds.
        """
        self._end_overdue(now)
        demotion = self._demotions.next(self._now, most_bytes)
        if demotion is None:
            return None
        # What Redis is still to free comes first, for the same segments may be written again now.
        self._trie.forget_coldest_ghosts()
        return replace(demotion, evict=self._due.order(REDIS) + demotion.evict)

    def finish_demotion(self, now: float, demotion_id: int, stored: Mapping[SegmentKey, int]) -> tuple[Evict, ...]:
        """Note what Redis has of a demotion, as bytes by key, and that the rest will not come.

        Returns what is due: for a demotion that has ended already, the eviction of what Redis holds without the index
        knowing it.
        """
        self._end_overdue(now)
        freed, strays = self._demotions.finish(demotion_id, stored)
        self.renewals.written(self._now, stored)
        due = self._due.keys(REDIS)
        strays = [key for key in strays if key not in due]
        return self._evict(freed) + ((Evict(REDIS, tuple(strays)),) if strays else ())

    def relieve(self, now: float) -> tuple[Evict, ...]:
        """Order CPU tiers above their mark to free some of the coldest segments that Redis has; () in the end."""
        self._advance(now)
        relieved = self._demotions.relieve()
        self._parts.counters.evicted_segments += len(relieved)
        return self._evict() + evictions(relieved)

    def prefetch(self, now: float, replica: str, location: Location, keys: Sequence[SegmentKey]) -> Offer:
        """Say which of ``keys``, stored at Redis, to copy to the CPU tier ``location``, and reserve them there.

        The rules are those of `offer`; it ends by `commit`, by `abandon`, or after ``save_s`` seconds.
        """
        due = self.expire(now)
        offer = self._saves.prefetch(self._now, replica, self._catalog.store(location), keys)
        self._trie.forget_coldest_ghosts()
        return replace(offer, evict=due + offer.evict)

    # Pins

    def pin(self, now: float, keys: Sequence[SegmentKey], ttl_s: float, tenant: str = "") -> PinReport:
        """Keep the chains that end with ``keys`` from eviction at every shared location, for ``ttl_s`` seconds.

        ``tenant``: tag of the tenant that owns the pin: it counts in that tenant's budget, and no other may end it.
        `clear`, `dropped` and `forget_holder` take them all the same. Raises `kvmanager.eviction.pins.UnknownKeyError`,
        `PinBudgetError`, and ValueError for a time out of bounds; nothing is changed then.
        """
        self._advance(now)
        self._pins.expire(self._now)
        return self._pins.pin(self._now, keys, ttl_s, tenant)

    def unpin(self, now: float, keys: Sequence[SegmentKey], tenant: str = "") -> list[SegmentKey]:
        """End a tenant's pins of ``keys``; return those that had one. UnknownKeyError: nothing is changed."""
        self._advance(now)
        self._pins.expire(self._now)
        unpinned = self._pins.unpin(keys, tenant)
        self._trie.forget_coldest_ghosts()
        return unpinned

    # What devices hold

    def device_stored(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Note that a replica's device pool now holds these blocks."""
        self._devices.stored(replica, hashes)

    def device_removed(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Note that a replica's device pool no longer holds these blocks."""
        self._devices.removed(replica, hashes)

    def device_cleared(self, replica: str) -> None:
        """Note that a replica's device pool is empty."""
        self._devices.forget(replica)

    # Losses and housekeeping

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone: its device, its leases and its unfinished saves. O(leases + saves)."""
        self.device_cleared(replica)
        self._due.add(self._leases.forget_replica(replica) + self._saves.forget_replica(replica))
        self._trie.forget_coldest_ghosts()

    def forget_holder(self, location: Location) -> None:
        """Note that a location is gone with all it held. `sweep` does what is left of it.

        Demotions and prefetches under way may go on, but nothing is committed at a location that is gone. The location
        may come back at once, with the same segments.
        """
        store = self._catalog.store(location)
        self._catalog.lose(store)
        self._due.drop(location)
        self.set_budget(location, 0)
        self._due.add(self._catalog.sweeps.step())
        self._trie.forget_coldest_ghosts()

    def clear(self, tiers: set[Tier], tenant: str | None = None) -> tuple[Evict, ...]:
        """Order whole tiers to be emptied, or of what a tenant (by tag) has in ``cpu`` and ``redis``; hotness stays.

        From now on no plan contains what is there, and nothing of it is kept from being cleared; what is stored from
        now on stays, though a segment that has not left yet is not stored again before it has. Leased segments leave
        when their lease ends. This orders the first evictions, `sweep` the others; meanwhile all of it counts in the
        budget. Devices are cleared by `kvmanager.moves.directives.Clear`.
        """
        for location, store in self._catalog.stores.items():
            if location.tier in tiers:
                self._catalog.clear(store, tenant)
        return self._evict(self._catalog.sweeps.step())

    @property
    def sweeping(self) -> bool:
        """Whether there is something left for `sweep` to do."""
        return bool(self._catalog.sweeps)

    def cleared(self, tier: Tier) -> int:
        """Return how many segments a tier was ever told to free because it was cleared."""
        return self._catalog.sweeps.cleared[tier]

    def sweep(self, now: float) -> tuple[Evict, ...]:
        """Go on with what is done in slices (`kvmanager.index.sweeps`): one slice. Returns the evictions that are due.

        To be called again as long as `sweeping`, with time for plans in between.
        """
        self._advance(now)
        return self._evict(self._catalog.sweeps.step())

    def expire(self, now: float) -> tuple[Evict, ...]:
        """End the leases, saves and pins whose time is over, and order all evictions that are due.

        To be called every second or so. O(expired).
        """
        self._end_overdue(now)
        return self._evict()

    def _end_overdue(self, now: float) -> None:
        self._advance(now)
        self._pins.expire(self._now)
        self._parts.snapshots.expire(self._now)
        self._due.add(self._leases.expire(self._now) + self._saves.expire(self._now))
        self._due.add(self._demotions.expire(self._now) + self._quotas.trim())

    def _evict(self, freed: Iterable[Copy] = ()) -> tuple[Evict, ...]:
        self._due.add(freed)
        self._trie.forget_coldest_ghosts()
        return self._due.order()

    def deltas_since(self, seen: Position, limit: int) -> Deltas:
        """Return what a mirror is told next: events about ``limit`` segments and blocks at most, or one event."""
        return deltas_since(self.epoch, self._parts.log, self._parts.snapshots, seen, limit)

    def lookup(self, hashes: Sequence[BlockHash], most_blocks: int | None = None) -> dict[str, Any]:
        """Describe what is known of a prompt, in blocks, without counting a use.

        ``most_blocks``: of a model with states, as many as leave a token to compute; it says where landings are then.
        """
        return lookup_report(self._parts, hashes, most_blocks)

    def stats(self, now: float) -> dict[str, Any]:
        """Return sizes and counters, for metrics and the control API. O(partitions and pins)."""
        self._advance(now)
        return manager_report(self._parts, self._now)

    def tenant_stats(self, now: float, tenant: str) -> dict[str, Any]:
        """Return what a tenant (by tag) may know of the cache: its own share. O(locations and pins)."""
        self._advance(now)
        return tenant_report(tenant, self._catalog.stores.values(), self._pins)

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
