"""Clearing, uprooting and losing in slices: what others do between two slices, and how much work a slice is."""

import contextlib
import random

import checked_policies
import pytest
from checked_policies import POLICIES
from naive_manager import hashes_of
from test_scale import calls_of

from kvmanager.config import ManagerConfig
from kvmanager.index import snapshots, sweeps
from kvmanager.index.deltas import HASHES_PER_EVENT, Position
from kvmanager.index.demotion_queue import CAPACITY
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.index.nodes import CopyState
from kvmanager.index.trie import PrefixTrie
from kvmanager.manager import KVManager
from kvmanager.moves.plans import PlanReason
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.segments.spans import split_segments

CPU = Location(Tier.CPU, "node")
TENANTS = ("", "tenant1", "tenant2")
UPHOLDING = (CopyState.RESERVED, CopyState.HELD, CopyState.RESIDENT)
LEASE_S, SAVE_S = 30.0, 20.0


class SlicedWorld:
    """A manager whose slices are tiny, tiers that obey it at once, and what nobody may be told to load."""

    def __init__(self, policy, seed):
        self.rng = random.Random(seed)
        checked_policies.evictions = []
        config = ManagerConfig(
            1,
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
        self.mirror = PlacementMirror(1)

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
        plan = self.manager.plan(self.now, "replica", "node", hashes)
        start = 0
        for segment in plan.segments:
            assert segment.start_block == start, "a gap"
            start += segment.num_blocks
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
        spans = split_segments(hashes, 0, len(hashes), 1, len(hashes), tenant)
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

    def promote(self):
        hashes, _ = self.prompt()
        offer = self.manager.promote(self.now, "replica", CPU, hashes)
        self.carry_out(offer.evict)
        if offer.keys:
            spans = {key: self.inventory[REDIS][key] for key in offer.keys}
            self.saves.append((offer.save_id, CPU, offer.keys, spans))

    def pin(self):
        hashes, tenant = self.prompt()
        key = self.manager.deepest_known(hashes)
        if key is not None:
            with contextlib.suppress(ValueError):
                self.manager.pin(self.now, [key], 40.0, tenant)

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

    def poll(self):
        """A router asks once; now and then the answer is lost on its way."""
        deltas = self.manager.deltas_since(self.mirror.position, self.rng.choice([1, 3, 10]))
        assert len(deltas.events) <= 10
        assert deltas.part is None or len(deltas.part.events) <= 3 * snapshots.MOST_TOLD
        if self.rng.random() < 0.9:
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
        *(promote, pin, set_quotas),
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
            if not self.poll().more and self.mirror.position == Position(self.manager._log.last):
                break
        else:
            raise AssertionError("a snapshot without end")
        view = self.mirror._view
        for location, store in self.manager._catalog.stores.items():
            resident = {copy.node.key for copy in store.copies() if copy.resident}
            assert view.shared.get((location.tier.value, location.holder), set()) == resident
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


@pytest.mark.parametrize("policy", ["coldest first", "lfu", "slru"])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_between_two_slices_anything_may_happen(policy, most, monkeypatch):
    monkeypatch.setattr(sweeps, "MOST_PER_SLICE", most)
    monkeypatch.setattr(snapshots, "MOST_TOLD", most)
    for seed in range(40):
        world = SlicedWorld(policy, seed)
        for number in range(150):
            world.step()
            try:
                world.check()
            except AssertionError as error:
                error.add_note(f"seed {seed}, step {number}")
                raise
        world.end()


def chain_of(brain, text):
    brain.serve(text)
    return brain.keys(text)


@pytest.fixture
def slow(brain_with, monkeypatch):
    """A brain with room for much, whose slices are of two steps."""
    monkeypatch.setattr(sweeps, "MOST_PER_SLICE", 2)
    return brain_with(budget=100)


def test_what_was_cleared_is_never_planned_though_it_has_not_gone_yet(slow):
    slow.serve("abcdefghijkl")
    slow.manager.clear({Tier.CPU})
    assert slow.manager.sweeping
    plan = slow.plan("abcdefghijkl")
    assert (plan.segments, plan.reason) == ((), PlanReason.EVICTED)
    assert slow.stored("abcdefghijkl") == 0


def test_what_is_stored_after_a_clear_was_asked_for_stays(slow):
    slow.serve("abcdefghijkl")
    evicted = [key for order in slow.manager.clear({Tier.CPU}) for key in order.keys]
    slow.serve("uvwx")
    while slow.manager.sweeping:
        evicted += [key for order in slow.manager.sweep(0.0) for key in order.keys]
    assert evicted == list(reversed(slow.keys("abcdefghijkl")))
    assert slow.stored("uvwx") == 4
    assert slow.serve("abcdefghijkl") == 0
    assert slow.stored("abcdefghijkl") == 12


def test_what_has_not_left_yet_is_not_stored_anew_and_counts_in_the_budget(slow):
    slow.serve("abcdefghijkl")
    slow.manager.set_budget(slow.cpu, 6)
    slow.manager.clear({Tier.CPU})
    assert not slow.offer("ab").keys
    assert slow.manager.stats(0.0)["locations"][0]["bytes"] == 4
    while slow.manager.sweeping:
        slow.manager.sweep(0.0)
    assert slow.offer("ab").keys == slow.keys("ab")


def test_a_lost_location_may_come_back_with_all_it_held_before_it_is_forgotten(slow):
    slow.serve("abcdefghijkl")
    plan = slow.plan("abcdefghijkl")
    slow.manager.forget_holder(slow.cpu)
    slow.manager.set_budget(slow.cpu, 100)
    assert slow.plan("abcdefghijkl").segments == ()
    spans = slow.spans("abcdefghijkl")
    assert len(slow.manager.adopt(0.0, slow.cpu, spans, [1] * len(spans))) == len(spans)
    while slow.manager.sweeping:
        assert slow.manager.sweep(0.0) == ()
    slow.manager.release(plan.lease_id)
    assert slow.manager.expire(0.0) == ()
    assert slow.stored("abcdefghijkl") == 12


def test_a_lost_root_hides_all_below_it_at_once(slow):
    for end in "xyz":
        slow.serve("abcdefgh" + end + end)
    slow.serve("uvwx")
    root = slow.keys("ab")
    evicted = [key for order in slow.manager.dropped(0.0, slow.cpu, root) for key in order.keys]
    assert slow.manager.sweeping
    assert slow.plan("abcdefghxx").segments == ()
    assert not slow.offer("ab").keys, "it is stored anew when what hangs on it has gone"
    while slow.manager.sweeping:
        evicted += [key for order in slow.manager.sweep(0.0) for key in order.keys]
    assert len(evicted) == len(set(evicted)) == 6
    assert root[0] not in evicted
    for end in "xyz":
        chain = slow.keys("abcdefgh" + end + end)[1:]
        assert [key for key in evicted if key in chain] == list(reversed(chain))
    assert slow.stored("uvwx") == 4
    assert slow.offer("ab").keys == root


def filled(segments, width):
    """A manager with one root and so many segments below it, in chains that branch `width` times."""
    manager = KVManager(ManagerConfig(1), epoch=1)
    manager.set_budget(CPU, 10**9)
    rng = random.Random(0)
    root = rng.randbytes(32)
    for _ in range(width):
        hashes = [root, *(rng.randbytes(32) for _ in range(segments // width))]
        spans = split_segments(hashes, 0, len(hashes), 1, len(hashes))
        manager.adopt(0.0, CPU, spans, [1] * len(spans))
    return manager, root


def clear(manager, root):
    return manager.clear({Tier.CPU})


def uproot(manager, root):
    return manager.dropped(0.0, CPU, [root])


def lose(manager, root):
    manager.forget_holder(CPU)
    return ()


def slices_of(begin, segments, width):
    """The Python calls that each slice makes, and the segments that each orders evicted."""
    manager, root = filled(segments, width)
    orders = []
    calls = [calls_of(lambda: orders.append(begin(manager, root)))]
    while manager.sweeping:
        calls.append(calls_of(lambda: orders.append(manager.sweep(0.0))))
    assert manager.stats(0.0)["locations"][0]["bytes"] == 0
    return calls, [sum(len(order.keys) for order in directives) for directives in orders]


@pytest.mark.parametrize("begin", [clear, uproot, lose])
@pytest.mark.parametrize("width", [4, 2500])
def test_a_slice_is_as_much_work_whatever_there_is_to_be_done(begin, width):
    """A root below which there are few chains, or thousands; ten thousand segments, or three times as many."""
    (few, ordered), (many, more_ordered) = (slices_of(begin, segments, width) for segments in (10_000, 30_000))
    assert max(many) <= 1.2 * max(few)
    assert len(many) >= 2.5 * len(few) >= 25
    assert max(ordered + more_ordered) <= sweeps.MOST_PER_SLICE


def test_redis_that_comes_to_a_full_index_is_told_in_slices_what_has_earned_a_copy():
    manager, _ = filled(30_000, 4)
    most = [calls_of(lambda: manager.set_budget(REDIS, 10**9))]
    while manager.sweeping:
        most.append(calls_of(lambda: manager.sweep(0.0)))
    assert len(most) >= 30
    assert max(most) <= 8 * CAPACITY, "the last one puts the hottest into the queue"
    assert manager.stats(0.0)["demotion_queue"] == CAPACITY


def test_siblings_that_are_forgotten_between_two_slices_do_not_lose_the_way(slow):
    """A ghost at which an uprooting has stopped leaves the trie; the children behind it are found all the same."""
    brain = slow
    for end in "pqrstuvwxyz":
        brain.serve("ab" + end + end)
    gone = [brain.keys("ab" + end + end)[1] for end in "qsuwy"]
    for key in gone:
        brain.manager.dropped(0.0, brain.cpu, [key])
    assert not brain.manager.sweeping
    brain.manager.dropped(0.0, brain.cpu, brain.keys("ab"))
    trie: PrefixTrie = brain.manager._trie
    evicted = []
    while brain.manager.sweeping:
        trie._max_ghosts = 0
        trie.forget_coldest_ghosts()
        evicted += [key for order in brain.manager.sweep(0.0) for key in order.keys]
    assert brain.manager.stats(0.0)["locations"][0]["bytes"] == 0
    assert set(evicted) <= {brain.keys("ab" + end + end)[1] for end in "prtvxz"}


def test_a_snapshot_comes_in_parts_of_a_bounded_size_and_the_old_view_serves_until_it_is_whole():
    manager, root = filled(20_000, 4)
    manager.device_stored("replica", [number.to_bytes(32, "big") for number in range(10_000)])
    mirror = PlacementMirror(1)
    mirror.apply(manager.deltas_since(mirror.position, 1))
    work, parts = [], 0
    while True:
        deltas = []
        work.append(calls_of(lambda into=deltas: into.append(manager.deltas_since(mirror.position, 4096))))
        mirror.apply(deltas[0])
        parts += 1
        told = sum(len(event[2]) if event[0] == "dev+" else 1 for event in deltas[0].part.events)
        assert told <= snapshots.MOST_TOLD + HASHES_PER_EVENT
        if not deltas[0].more:
            break
        assert mirror.coverage([root], "replica").cpu == 0
    assert parts >= 6
    assert max(work) <= 12 * snapshots.MOST_TOLD
    assert mirror.coverage([root], "replica").cpu == 1
    assert mirror.coverage([(0).to_bytes(32, "big"), (1).to_bytes(32, "big")], "replica").device == 2


def test_what_a_device_reports_at_once_is_told_in_events_of_a_bounded_size():
    manager = KVManager(ManagerConfig(1), epoch=1)
    manager.device_stored("replica", [number.to_bytes(32, "big") for number in range(10_000)])
    manager.device_removed("replica", [number.to_bytes(32, "big") for number in range(10_000)])
    seen, told = Position(0), []
    while True:
        deltas = manager.deltas_since(seen, 1024)
        seen = Position(deltas.last)
        told.append(sum(len(event[2]) for event in deltas.events))
        if not deltas.more:
            break
    assert sum(told) == 20_000
    assert max(told) <= 1024
