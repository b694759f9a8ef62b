"""A manager whose work is cut into slices, driven by random steps between them, and what holds at any time."""

import contextlib
import random

import checked_policies
from checked_policies import POLICIES
from naive_manager import hashes_of

from kvmanager.config import ManagerConfig
from kvmanager.index import snapshots
from kvmanager.index.deltas import Position
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.index.nodes import CopyState
from kvmanager.index.run_index import RunIndex
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.routing.mirror import PlacementMirror

CPU = Location(Tier.CPU, "node")
TENANTS = ("", "tenant1", "tenant2")
UPHOLDING = (CopyState.RESERVED, CopyState.HELD, CopyState.RESIDENT)
LEASE_S, SAVE_S = 30.0, 20.0


def is_reached(copy, leaving):
    """Whether the parent's copy is RESIDENT, or all is below what is being uprooted."""
    if copy.node.parent is None:
        return True
    node = copy.node.parent
    parent = node.copy_at(copy.store)
    if parent is not None and parent.resident:
        return True
    while parent is not None and parent not in leaving and node.parent is not None:
        node = node.parent
        parent = node.copy_at(copy.store)
    return parent in leaving


class SlicedWorld:
    """A manager whose slices are tiny, tiers that obey it at once, and what nobody may be told to load."""

    def __init__(self, policy, seed):
        self.rng = random.Random(seed)
        checked_policies.evictions = []
        self.most = self.rng.choice([1, 2, 4])
        config = ManagerConfig(
            self.most,
            lease_s=LEASE_S,
            save_s=SAVE_S,
            max_deltas=20,
            max_ghosts=12,
            eviction_policy=f"{checked_policies.__name__}:{POLICIES[policy].__name__}",
            pin_budget_bytes=10,
        )
        self.now = 0.0
        self.manager = KVManager(config, epoch=1)
        self.budgets = {CPU: 30, REDIS: 40}
        for location, budget in self.budgets.items():
            self.manager.set_budget(location, budget)
        self.inventory = {CPU: {}, REDIS: {}}
        self.forbidden = {CPU: set(), REDIS: set()}
        self.leased, self.saves, self.demotions = {}, [], []
        self.mirror = PlacementMirror(self.most)

    def prompt(self):
        tenant = self.rng.choice(TENANTS)
        return hashes_of([self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 5))], tenant), tenant

    def carry_out(self, directives):
        for order in directives:
            for key in order.keys:
                assert self.inventory[order.source].pop(key, None) or order.source == REDIS
                for until, held in self.leased.values():
                    assert until <= self.now or (order.source, key) not in held, "a leased segment was evicted"

    def lost(self, location, keys):
        for key in keys:
            self.inventory[location].pop(key, None)
            for _, held in self.leased.values():
                held.discard((location, key))

    def kept(self, location, keys, spans):
        for key in keys:
            self.inventory[location][key] = spans[key]
            self.forbidden[location].discard(key)

    # What happens

    def plan(self):
        hashes, _ = self.prompt()
        plan = self.manager.plan(self.now, "replica", "node", PlanQuery(hashes))
        start = 0
        for segment in plan.segments:
            assert segment.start_block <= start < segment.end_block, "a gap"
            start = segment.end_block
            assert segment.key in self.inventory[segment.location], "planned, but not there"
            assert segment.key not in self.forbidden[segment.location], "planned after it was cleared or lost"
        if plan.lease_id:
            held = {(segment.location, segment.key) for segment in plan.segments}
            self.leased[plan.lease_id] = (self.now + LEASE_S, held)

    def release(self):
        if self.leased:
            lease_id = self.rng.choice(list(self.leased))
            del self.leased[lease_id]
            self.manager.release(lease_id)

    def offer(self):
        hashes, tenant = self.prompt()
        first = self.rng.randint(0, len(hashes)) if self.rng.random() < 0.2 else 0
        spans = self.manager.cut(CPU, hashes, first, len(hashes), self.rng.randint(first, len(hashes)), tenant)
        offer = self.manager.offer(self.now, "replica", CPU, spans, [1] * len(spans))
        self.carry_out(offer.evict)
        if offer.keys:
            self.saves.append((offer.save_id, CPU, offer.keys, {span.key: span for span in spans}))

    def commit(self):
        if self.saves:
            save_id, location, keys, spans = self.saves.pop(self.rng.randrange(len(self.saves)))
            keys = self.rng.sample(keys, self.rng.randint(0, len(keys)))
            accepted = self.manager.commit(self.now, location, keys, [1] * len(keys))
            self.kept(location, accepted, spans)
            if self.rng.random() < 0.5:
                self.manager.abandon(save_id)

    def serve(self):
        self.offer()
        self.commit()

    def demote(self):
        demotion = self.manager.next_demotion(self.now, 3)
        if demotion is not None:
            self.carry_out(demotion.evict)
            self.leased["demotion", demotion.demotion_id] = (
                self.now + SAVE_S,
                {(demotion.source, key) for key in demotion.keys},
            )
            self.demotions.append((demotion, {key: self.inventory[CPU][key] for key in demotion.keys}))

    def finish_demotion(self):
        if self.demotions:
            demotion, spans = self.demotions.pop(0)
            self.leased.pop(("demotion", demotion.demotion_id), None)
            stored = [key for key in demotion.keys if self.rng.random() < 0.8]
            before = set(self.inventory[REDIS])
            if self.budgets[REDIS]:
                self.inventory[REDIS] |= {key: spans[key] for key in stored}
            evict = self.manager.finish_demotion(self.now, demotion.demotion_id, dict.fromkeys(stored, 1))
            for key in set(stored) - before:
                self.forbidden[REDIS].discard(key)
            self.carry_out(evict)

    def prefetch(self):
        hashes, _ = self.prompt()
        offer = self.manager.prefetch(self.now, "replica", CPU, hashes)
        self.carry_out(offer.evict)
        if offer.keys:
            spans = {key: self.inventory[REDIS][key] for key in offer.keys}
            self.saves.append((offer.save_id, CPU, offer.keys, spans))

    def pin(self):
        hashes, tenant = self.prompt()
        if keys := self.manager.known_ends(hashes):
            with contextlib.suppress(ValueError):
                self.manager.pin(self.now, keys, 40.0, tenant)

    def set_quotas(self):
        quotas = {tenant: self.rng.randint(0, 8) for tenant in TENANTS[1:] if self.rng.random() < 0.5}
        self.manager.set_quotas(self.rng.choice([Tier.CPU, Tier.REDIS]), quotas)

    def clear(self):
        location, tenant = self.rng.choice([CPU, REDIS]), self.rng.choice([None, *TENANTS])
        self.forbidden[location] |= {
            key for key, span in self.inventory[location].items() if tenant in (None, span.tenant)
        }
        self.carry_out(self.manager.clear({location.tier}, tenant))

    def dropped(self):
        location = self.rng.choice([CPU, REDIS])
        self.carry_out(self.manager.expire(self.now))
        if self.inventory[location]:
            keys = self.rng.sample(sorted(self.inventory[location]), 1)
            if self.rng.random() < 0.5:  # a root
                keys = [key for key, span in self.inventory[location].items() if span.parent is None][:1] or keys
            self.lost(location, keys)
            self.forbidden[location].update(keys)
            self.carry_out(self.manager.dropped(self.now, location, keys))

    def lose(self):
        location = self.rng.choice([CPU, REDIS])
        self.carry_out(self.manager.expire(self.now))
        there = self.inventory[location]
        self.manager.forget_holder(location)
        self.manager.set_budget(location, self.budgets[location])
        self.saves = [save for save in self.saves if save[1] != location]
        self.lost(location, list(there))
        self.forbidden[location].clear()
        if self.rng.random() < 0.5:  # it registers again at once, with what it held
            spans = sorted(there.values(), key=lambda span: span.start_block)
            accepted = self.manager.adopt(self.now, location, spans, [1] * len(spans))
            self.kept(location, accepted, {span.key: span for span in spans})

    def relieve(self):
        self.carry_out(self.manager.relieve(self.now))

    def time_passes(self):
        self.now += self.rng.choice([0.1, 1.0, 25.0])
        self.carry_out(self.manager.expire(self.now))

    def sweep(self):
        self.carry_out(self.manager.sweep(self.now))

    def poll(self, lost=0.1):
        """A router asks once; now and then the answer is lost on its way."""
        deltas = self.manager.deltas_since(self.mirror.position, self.rng.choice([1, 3, 10]))
        assert len(deltas.events) <= 10
        assert deltas.part is None or len(deltas.part.events) <= 3 * snapshots.MOST_TOLD
        if self.rng.random() >= lost:
            self.mirror.apply(deltas)
        return deltas

    def device_changes(self):
        hashes, _ = self.prompt()
        replica = self.rng.choice(["replica", "other"])
        change = self.rng.choice([self.manager.device_stored, self.manager.device_removed])
        change(replica, hashes)
        if self.rng.random() < 0.05:
            self.manager.device_cleared(replica)

    STEPS = (
        *(plan, plan, release, offer, commit, serve, serve, serve, demote, demote, finish_demotion, finish_demotion),
        *(prefetch, pin, set_quotas),
        *(clear, dropped, dropped, lose, relieve, time_passes, sweep, sweep, sweep),
        *(poll, poll, poll, device_changes, device_changes),
    )

    def step(self):
        self.rng.choice(self.STEPS)(self)

    def end(self):
        """All that was begun ends, and the index knows what the tiers hold, no more and no less."""
        self.now += 1000.0
        while self.manager.sweeping:
            self.sweep()
        self.carry_out(self.manager.expire(self.now))
        while self.manager.sweeping:
            self.sweep()
        for location, store in self.manager._catalog.stores.items():
            assert {copy.node.key for copy in store.copies()} == self.inventory[location].keys()
            assert store.used_bytes == len(self.inventory[location])
            assert not store.reserved_bytes
            assert not store.retiring
            assert not store.waiting
        assert not self.manager._catalog.sweeps.leaving
        self.mirror_is_the_index()

    def mirror_is_the_index(self):
        for _ in range(1000):
            if not self.poll(lost=0).more and self.mirror.position == Position(self.manager._parts.log.last):
                break
        else:
            raise AssertionError("a snapshot without end")
        view = self.mirror._view
        for location, store in self.manager._catalog.stores.items():
            resident = sorted(copy.node.marks for copy in store.copies() if copy.resident)
            told = view.shared.get((location.tier.value, location.holder), RunIndex())
            assert sorted(run.marks for first in told._first for run in told.twins(first)) == resident
        for replica in ("replica", "other"):
            assert view.devices._blocks.get(replica, set()) == set(self.manager._devices.held(replica))

    # What holds at any time

    def check(self):
        catalog = self.manager._catalog
        leaving = catalog.sweeps.leaving
        copies = [copy for node in catalog.trie.nodes.values() for copy in node.all_copies()]
        counted_on = {}
        for copy in copies:
            if copy.state in UPHOLDING or copy in leaving:
                parent = None if copy.node.parent is None else copy.node.parent.copy_at(copy.store)
                if parent is not None and parent.share is copy.share:
                    counted_on[parent] = counted_on.get(parent, 0) + 1
        exposed = {copy for copy in copies for partition in [copy.partition] if copy in partition.policy.exposed}
        for copy in copies:
            assert copy.state is not CopyState.GONE
            if copy.state in UPHOLDING and not copy.store.lost:
                assert copy.children == counted_on.get(copy, 0)
            if not copy.store.lost:
                assert (copy in exposed) == copy.evictable
                if copy.resident:
                    assert is_reached(copy, leaving), "RESIDENT without its parent"
        for location, store in catalog.stores.items():
            here = [copy for copy in copies if copy.store is store]
            assert store.used_bytes == sum(copy.nbytes for copy in here) <= self.budgets[location]
            assert store.reserved_bytes == sum(copy.nbytes for copy in here if copy.state is CopyState.RESERVED)
            assert store.resident_segments == sum(copy.state is CopyState.RESIDENT for copy in here)
            for partition in store.partitions():
                assert partition.used_bytes == sum(copy.nbytes for copy in here if copy.partition is partition)
            for tenant, share in store.shares.items():
                assert share.copies == sum(copy.share is share for copy in here) > 0
                assert share.tenant == tenant
        trie = catalog.trie
        assert trie.num_ghosts == sum(node.copies is None for node in trie.nodes.values())


class WideWorld(SlicedWorld):
    """Twenty conversations below each of two system prompts, which lose single segments, and seldom all."""

    SIBLINGS = 20

    def __init__(self, policy, seed):
        super().__init__(policy, seed)
        self.manager._trie._max_ghosts = 1000
        self.budgets = dict.fromkeys(self.budgets, 200)
        for location, budget in self.budgets.items():
            self.manager.set_budget(location, budget)
        self.fill()
        self.fill()

    def fill(self):
        root = self.rng.randint(0, 1)
        for number in range(self.SIBLINGS):
            self.store(hashes_of([token for token in (root, number) for _ in range(self.most)]))

    def store(self, hashes):
        spans = self.manager.cut(CPU, hashes, 0, len(hashes), len(hashes))
        offer = self.manager.offer(self.now, "replica", CPU, spans, [1] * len(spans))
        self.carry_out(offer.evict)
        accepted = self.manager.commit(self.now, CPU, offer.keys, [1] * len(offer.keys))
        self.kept(CPU, accepted, {span.key: span for span in spans})

    def prompt(self):
        tenant = self.rng.choice(["", "", "", "tenant1"])
        numbers = self.rng.sample(range(self.SIBLINGS), self.rng.choice([0, 1, 1, 2]))
        tokens = [self.rng.randint(0, 1), *numbers]
        return hashes_of([token for token in tokens for _ in range(self.most)], tenant), tenant

    def sweep(self):
        for _ in range(self.rng.choice([1, 1, 1, 100])):
            super().sweep()

    STEPS = (
        *(SlicedWorld.plan,) * 12,
        *(SlicedWorld.release,) * 2,
        *(SlicedWorld.serve,) * 8,
        *(SlicedWorld.offer, SlicedWorld.relieve, SlicedWorld.poll),
        *(SlicedWorld.commit, SlicedWorld.demote, SlicedWorld.finish_demotion, SlicedWorld.prefetch) * 2,
        *(SlicedWorld.dropped,) * 4,
        *(fill, sweep, sweep),
    )
