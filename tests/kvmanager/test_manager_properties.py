"""Random operations against the naive manager: after each one, both agree and every invariant holds."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from naive_manager import HALF_LIFE, NaiveManager, hashes_of

from kvmanager.config import ManagerConfig
from kvmanager.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.mirror import PlacementMirror
from kvmanager.segments import split_segments

LOCATIONS = (Location(Tier.CPU, "node0"), Location(Tier.CPU, "node1"), Location(Tier.REDIS, ""))
REPLICAS = ("replica0", "replica1")
LEASE_S, SAVE_S = 30.0, 20.0

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7)
locations = st.sampled_from(LOCATIONS)
replicas = st.sampled_from(REPLICAS)
sizes = st.integers(1, 4)


class ManagerMachine(RuleBasedStateMachine):
    saves = Bundle("saves")
    leases = Bundle("leases")

    @initialize(blocks_per_segment=st.integers(1, 3), budgets=st.lists(st.integers(0, 16), min_size=3, max_size=3))
    def start(self, blocks_per_segment, budgets):
        self.blocks_per_segment = blocks_per_segment
        self.budgets = dict(zip(LOCATIONS, budgets, strict=True))
        self.mirror = PlacementMirror(blocks_per_segment)
        self.now, self.epoch = 0.0, 0
        self.inventory = {location: {} for location in LOCATIONS}  # what each tier really holds: key -> (span, size)
        self.spans = {}
        self.new_manager()

    def new_manager(self):
        self.epoch += 1
        config = ManagerConfig(
            self.blocks_per_segment, lease_s=LEASE_S, save_s=SAVE_S, half_life_requests=HALF_LIFE, max_deltas=8
        )
        self.manager = KVManager(config, self.epoch)
        self.naive = NaiveManager(self.budgets, self.blocks_per_segment, LEASE_S, SAVE_S, now=self.now)
        for location, budget in self.budgets.items():
            self.manager.set_budget(location, budget)

    def carry_out(self, directives):
        for order in directives:
            held = self.inventory[order.source]
            order_of = {key: position for position, key in enumerate(order.keys)}
            for key in order.keys:
                span, _ = held.pop(key)
                assert order_of.get(span.parent, len(order_of)) > order_of[key], "a parent went before its child"
                active = [
                    copy
                    for end, _, copies in self.naive.leases.values()
                    for copy in copies
                    if end > self.now and self.naive.copies[order.source].get(key) is copy
                ]
                assert not active, "a leased segment was evicted"

    @rule(target=leases, prompt=prompts, device=st.integers(0, 7), replica=replicas, node=st.sampled_from(["node0", "x"]))
    def plan(self, prompt, device, replica, node):
        hashes = hashes_of(prompt)
        device = min(device, len(hashes))
        plan = self.manager.plan(self.now, replica, node, hashes, device)
        self.naive.plan(self.now, replica, node, hashes, device, plan)
        return plan.lease_id if plan.lease_id else multiple()

    @rule(lease_id=leases)
    def release(self, lease_id):
        self.manager.release(lease_id)
        self.naive.release(lease_id)

    @rule(
        target=saves,
        prompt=prompts,
        start=st.integers(0, 7),
        num_prompt=st.integers(0, 7),
        replica=replicas,
        location=locations,
        data=st.data(),
    )
    def offer(self, prompt, start, num_prompt, replica, location, data):
        hashes = hashes_of(prompt)
        ends = [0, *(end for end, key in enumerate(hashes, 1) if key in self.naive.known)]
        first = max(end for end in ends if end <= start)
        spans = split_segments(hashes, first, len(hashes), self.blocks_per_segment, num_prompt)
        nbytes = data.draw(st.lists(sizes, min_size=len(spans), max_size=len(spans)))
        self.spans.update((span.key, span) for span in spans)
        offer = self.manager.offer(self.now, replica, location, spans, nbytes)
        self.naive.offer(self.now, replica, location, spans, nbytes, offer)
        self.carry_out(offer.evict)
        return (offer.save_id, location, offer.keys, self.epoch) if offer.keys else multiple()

    @rule(save=saves, data=st.data())
    def commit(self, save, data):
        _, location, keys, _ = save
        keys = data.draw(st.permutations(keys))[: data.draw(st.integers(1, len(keys)))]
        nbytes = data.draw(st.lists(sizes, min_size=len(keys), max_size=len(keys)))
        accepted = self.manager.commit(self.now, location, keys, nbytes)
        self.naive.commit(self.now, location, keys, nbytes, accepted)
        for key in accepted:
            copy = self.naive.copies[location][key]
            self.inventory[location][key] = (self.naive.known[key], copy.nbytes)

    @rule(save=consumes(saves))
    def abandon(self, save):
        if save[3] == self.epoch:
            self.manager.abandon(save[0])
            self.naive.abandon(save[0])

    @rule(location=locations, data=st.data())
    def dropped(self, location, data):
        held = sorted(self.inventory[location])
        keys = data.draw(st.lists(st.sampled_from(held), max_size=2, unique=True)) if held else [b"?" * 32]
        for key in keys:
            self.inventory[location].pop(key, None)
        # What the tier lost need not be evicted any more, even where the manager still means to.
        directives = self.manager.expire(self.now)
        self.naive.carried_out_at = self.naive.expired(self.now)
        self.naive.carried_out(directives)
        self.carry_out([order for order in directives])
        directives = self.manager.dropped(self.now, location, keys)
        self.naive.dropped(location, keys)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    @rule(step=st.sampled_from([0.0, 1.0, 12.0, 25.0, 100.0]))
    def expire(self, step):
        self.now += step
        directives = self.manager.expire(self.now)
        self.naive.expired(self.now)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    @rule(tier=st.sampled_from([Tier.CPU, Tier.REDIS]))
    def clear(self, tier):
        directives = self.manager.clear({tier})
        self.naive.clear({tier})
        self.naive.carried_out(directives)
        self.carry_out(directives)
