"""What a manager is made of, and what it tells about itself.

`kvmanager.manager.KVManager` adds what can be asked of it. One thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvmanager.config import ManagerConfig
from kvmanager.eviction.pins import Pins
from kvmanager.eviction.policies import EvictionPolicy, PolicySetting, find_policy, make_policy
from kvmanager.eviction.quotas import Quotas
from kvmanager.eviction.reuse_model import ReuseModel
from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.deltas import DeltaLog, Deltas, Position
from kvmanager.index.demotion_queue import DemotionQueue
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.snapshots import Snapshots
from kvmanager.index.trie import PrefixTrie
from kvmanager.moves.demotions import Demotions
from kvmanager.moves.due_evictions import DueEvictions
from kvmanager.moves.offloads import Offloads
from kvmanager.moves.plans import Planner
from kvmanager.moves.renewals import Renewals
from kvmanager.moves.saves import Saves
from kvmanager.report import lookup_report, store_report, tenant_report
from kvmanager.segments.keys import BlockHash


class ManagerParts:
    """The parts, wired together. ``epoch``: a number that no other manager of this server ever had, e.g. random.

    Raises ValueError for an eviction policy that is not known or cannot be made.
    """

    def __init__(self, config: ManagerConfig, epoch: int) -> None:
        self.epoch = epoch
        self._now = float("-inf")
        self._counters = Counters()
        self._clock = HotnessClock(config.half_life_requests)
        self._log = DeltaLog(config.max_deltas)
        self._config = config
        self._reuse = ReuseModel() if self._policy_class().learns else None
        self._trie = PrefixTrie(config.max_ghosts, None if self._reuse is None else self._reuse.forgot)
        self._queue = DemotionQueue(self._clock, self._counters, config.redis_min_uses)
        self._make_policy(lambda: 0)  # what is no policy is refused now, not when the first tier comes
        self._catalog = Catalog(self._trie, self._clock, self._log, self._make_policy, self._queue, self._reuse)
        self._renewals = Renewals(self._trie, self._catalog.stores, self._counters, config.redis_renew_s)
        self._planner = Planner(
            self._catalog, self._counters, self._renewals, config.blocks_per_segment, config.lease_s
        )
        self._saves = Saves(self._catalog, self._counters, config.blocks_per_segment, config.save_s)
        self._demotions = Demotions(self._catalog, self._queue, self._counters, config.cpu_high_water, config.save_s)
        self._pins = Pins(self._catalog, config.pin_budget_bytes, config.longest_pin_s, config.tenant_pin_bytes)
        self._quotas = Quotas(self._catalog, self._counters)
        self._devices = DeviceIndex()
        self._snapshots = Snapshots(self._catalog, self._devices)
        self.offloads = Offloads(self._trie, self._planner, self._devices, self._clock, config.blocks_per_segment)
        """What devices hold and no shared tier has; for reading only."""
        self._due = DueEvictions(self._counters)

    def deltas_since(self, seen: Position, limit: int) -> Deltas:
        """Return what a mirror is told next: events about ``limit`` segments and blocks at most, or one event.

        Where some are lost a snapshot begins; while it is told, each answer that has all events brings a part of it.
        O(limit + part).
        """
        log = self._log
        events = log.since(seen.seq, limit)
        if events is None:
            part = self._snapshots.part(0, 0)
            return Deltas(self.epoch, log.last + 1, log.last, [], part, more=not part.last)
        last = seen.seq + len(events)
        if last < log.last or not seen.snapshot_id:
            return Deltas(self.epoch, seen.seq + 1, last, events, more=last < log.last)
        part = self._snapshots.part(seen.snapshot_id, seen.part)
        return Deltas(self.epoch, seen.seq + 1, last, events, part, more=not part.last)

    def lookup(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """Describe what is known of a prompt, in blocks, without counting a use."""
        return lookup_report(self._catalog, self._planner, self._devices, self._clock, hashes)

    def stats(self, now: float) -> dict[str, Any]:
        """Return sizes and counters, for metrics and the control API. O(partitions and pins)."""
        self._advance(now)
        return {
            "nodes": len(self._trie.nodes),
            "ghosts": self._trie.num_ghosts,
            "locations": [store_report(store) for store in self._catalog.stores.values()],
            "leases": len(self._planner),
            "reservations": len(self._saves),
            "demotions": len(self._demotions),
            "demotion_queue": len(self._queue),
            **self._pins.report(self._now),
            "oldest_lease_s": self._planner.oldest_s(self._now),
            "oldest_reservation_s": self._saves.oldest_s(self._now),
            "last_delta": self._log.last,
            "counters": asdict(self._counters),
        }

    def tenant_stats(self, now: float, tenant: str) -> dict[str, Any]:
        """Return what a tenant (by tag) may know of the cache: its own share. O(locations and pins)."""
        self._advance(now)
        return tenant_report(tenant, self._catalog.stores.values(), self._pins)

    def _policy_class(self) -> type[EvictionPolicy]:
        return find_policy(self._config.eviction_policy)

    def _make_policy(self, budget_bytes: Callable[[], int]) -> EvictionPolicy:
        setting = PolicySetting(self._clock, budget_bytes, self._config.policy_seed, self._reuse)
        return make_policy(self._config.eviction_policy, setting)

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
