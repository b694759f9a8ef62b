"""Random operations against the naive manager: after each one, both agree and every invariant holds."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from naive_manager import HALF_LIFE, NaiveManager, hashes_of

from kvmanager import policies
from kvmanager.config import ManagerConfig
from kvmanager.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.mirror import PlacementMirror
from kvmanager.policies.lfu import DecayedLfu
from kvmanager.segments import split_segments

LOCATIONS = (Location(Tier.CPU, "node0"), Location(Tier.CPU, "node1"), REDIS)
REPLICAS = ("replica0", "replica1")
LEASE_S, SAVE_S = 30.0, 20.0

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
locations = st.sampled_from((LOCATIONS[0], *LOCATIONS))  # crowd the first one
replicas = st.sampled_from(REPLICAS)
sizes = st.integers(1, 3)


class CheckedLfu(DecayedLfu):
    """The real policy, remembering what it was told may go."""

    def __init__(self):
        super().__init__()
        self.exposed = set()
        CheckedLfu.made.append(self)

    def expose(self, copy):
        assert copy not in self.exposed
        self.exposed.add(copy)
        super().expose(copy)

    def shield(self, copy):
        self.exposed.remove(copy)
        super().shield(copy)

    def victim(self):
        victim = super().victim()
        assert (victim is None) == (not self.exposed)
        return victim


policies._POLICIES["checked"] = CheckedLfu


class ManagerMachine(RuleBasedStateMachine):
    saves = Bundle("saves")
    leases = Bundle("leases")
    demotions = Bundle("demotions")

    @initialize(
        blocks_per_segment=st.integers(1, 3),
        budgets=st.lists(st.integers(2, 10), min_size=3, max_size=3),
        min_uses=st.sampled_from([1.0, 1.0, 2.0]),
        high_water=st.sampled_from([0.3, 0.7, 1.0]),
    )
    def start(self, blocks_per_segment, budgets, min_uses, high_water):
        self.blocks_per_segment, self.min_uses, self.high_water = blocks_per_segment, min_uses, high_water
        self.budgets = dict(zip(LOCATIONS, budgets, strict=True))
        self.redis_budget = self.budgets[REDIS]
        self.away = {}  # what Redis holds while it is not there
        self.mirror = PlacementMirror(blocks_per_segment)
        self.now, self.epoch = 0.0, 0
        self.inventory = {location: {} for location in LOCATIONS}  # what each tier really holds: key -> (span, size)
        self.new_manager()

    def new_manager(self):
        self.epoch += 1
        config = ManagerConfig(
            self.blocks_per_segment,
            lease_s=LEASE_S,
            save_s=SAVE_S,
            half_life_requests=HALF_LIFE,
            max_deltas=8,
            eviction_policy="checked",
            cpu_high_water=self.high_water,
            redis_min_uses=self.min_uses,
        )
        CheckedLfu.made = []
        self.manager = KVManager(config, self.epoch)
        self.leased = {}  # lease id -> (end, replica, {(location, key)})
        self.naive = NaiveManager(self.budgets, self.blocks_per_segment, LEASE_S, SAVE_S, self.high_water, now=self.now)
        for location, budget in self.budgets.items():
            self.manager.set_budget(location, budget)

    def carry_out(self, directives):
        for order in directives:
            position = {key: place for place, key in enumerate(order.keys)}
            for key in order.keys:
                span = self.naive.known[key]
                found = self.inventory[order.source].pop(key, None)
                assert found or order.source == REDIS, "only a demotion may have left less than was reserved"
                assert position.get(span.parent, len(position)) > position[key], "a parent went before its child"
                for end, _, held in self.leased.values():
                    assert end <= self.now or (order.source, key) not in held, "a leased segment was evicted"

    def lost(self, location, keys):
        for key in keys:
            self.inventory[location].pop(key, None)
            for _, _, held in self.leased.values():
                held.discard((location, key))

    def expire_now(self):
        directives = self.manager.expire(self.now)
        self.naive.expired(self.now)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    @rule(
        target=leases, prompt=prompts, device=st.integers(0, 7), replica=replicas, node=st.sampled_from(["node0", "x"])
    )
    def plan(self, prompt, device, replica, node):
        hashes = hashes_of(prompt)
        device = min(device, len(hashes))
        plan = self.manager.plan(self.now, replica, node, hashes, device)
        self.naive.plan(self.now, replica, node, hashes, device, plan)
        if not plan.lease_id:
            return multiple()
        held = {(segment.location, segment.key) for segment in plan.segments}
        self.leased[plan.lease_id] = (self.now + LEASE_S, replica, held)
        return (plan.lease_id, self.epoch)

    @rule(lease=leases)
    def release(self, lease):
        lease_id, epoch = lease
        if epoch == self.epoch:
            self.leased.pop(lease_id, None)
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
        spans, nbytes = self.cut(prompt, start, num_prompt, data)
        offer = self.manager.offer(self.now, replica, location, spans, nbytes)
        self.naive.offer(self.now, replica, location, spans, nbytes, offer)
        self.carry_out(offer.evict)
        return (offer.save_id, location, offer.keys, self.epoch) if offer.keys else multiple()

    def cut(self, prompt, start, num_prompt, data):
        """Return segments of a prompt from the last known end up to ``start`` on, and a size for each."""
        hashes = hashes_of(prompt)
        ends = [0, *(end for end, key in enumerate(hashes, 1) if key in self.naive.known)]
        first = max(end for end in ends if end <= start)
        spans = split_segments(hashes, first, len(hashes), self.blocks_per_segment, num_prompt)
        return spans, data.draw(st.lists(sizes, min_size=len(spans), max_size=len(spans)))

    @rule(prompt=prompts, num_prompt=st.integers(0, 6), location=locations, size=sizes, demote=st.booleans())
    def serve(self, prompt, num_prompt, location, size, demote):
        """Plan, promote, compute and store a whole prompt, as a healthy server does, and make use of Redis."""
        hashes = hashes_of(prompt)
        plan = self.manager.plan(self.now, "replica0", "node0", hashes)
        self.naive.plan(self.now, "replica0", "node0", hashes, 0, plan)
        if location != REDIS:
            keys = [segment.key for segment in plan.segments if segment.location == REDIS]
            promotion = self.manager.promote(self.now, "replica0", location, keys)
            self.naive.promote(self.now, "replica0", location, keys, promotion)
            self.carry_out(promotion.evict)
            nbytes = [self.naive.copies[location][key].nbytes for key in promotion.keys]
            accepted = self.manager.commit(self.now, location, promotion.keys, nbytes)
            self.naive.commit(self.now, location, promotion.keys, nbytes, accepted)
            self.keep(location, accepted)
        spans = split_segments(hashes, 0, len(hashes), self.blocks_per_segment, num_prompt)
        nbytes = [size] * len(spans)
        offer = self.manager.offer(self.now, "replica0", location, spans, nbytes)
        self.naive.offer(self.now, "replica0", location, spans, nbytes, offer)
        self.carry_out(offer.evict)
        accepted = self.manager.commit(self.now, location, offer.keys, nbytes[: len(offer.keys)])
        self.naive.commit(self.now, location, offer.keys, nbytes[: len(offer.keys)], accepted)
        self.keep(location, accepted)
        self.manager.release(plan.lease_id)
        self.naive.release(plan.lease_id)
        if demote:
            self.all_is_demoted(4)
            self.relieve()

    @rule(save=saves, data=st.data())
    def commit(self, save, data):
        _, location, keys, _ = save
        keys = data.draw(st.permutations(keys))[: data.draw(st.integers(1, len(keys)))]
        nbytes = data.draw(st.lists(sizes, min_size=len(keys), max_size=len(keys)))
        accepted = self.manager.commit(self.now, location, keys, nbytes)
        self.naive.commit(self.now, location, keys, nbytes, accepted)
        self.keep(location, accepted)

    @rule(prompt=prompts, start=st.integers(0, 7), num_prompt=st.integers(0, 7), location=locations, data=st.data())
    def adopt(self, prompt, start, num_prompt, location, data):
        spans, nbytes = self.cut(prompt, start, num_prompt, data)
        accepted = self.manager.adopt(self.now, location, spans, nbytes)
        self.naive.adopt(self.now, location, spans, nbytes, accepted)
        self.keep(location, accepted)

    def keep(self, location, accepted):
        for key in accepted:
            self.inventory[location][key] = (self.naive.known[key], self.naive.copies[location][key].nbytes)

    @rule(save=consumes(saves))
    def abandon(self, save):
        if save[3] == self.epoch:
            self.manager.abandon(save[0])
            self.naive.abandon(save[0])

    @rule(target=demotions, most_bytes=st.integers(0, 8))
    def next_demotion(self, most_bytes):
        demotion = self.manager.next_demotion(self.now, most_bytes)
        self.naive.next_demotion(self.now, most_bytes, demotion)
        if demotion is None:
            return multiple()
        self.carry_out(demotion.evict)
        held = {(demotion.source, key) for key in demotion.keys}
        self.leased["demotion", demotion.demotion_id] = (self.now + SAVE_S, "", held)
        return (demotion, self.epoch)

    @rule(demotion=demotions, data=st.data())
    def finish_demotion(self, demotion, data):
        """Some come late, and twice."""
        demotion, epoch = demotion
        if epoch == self.epoch:
            stored = [key for key in demotion.keys if data.draw(st.sampled_from([True, True, False]))]
            self.finish(demotion, stored)

    def finish(self, demotion, stored):
        if self.budgets[REDIS]:
            self.write(demotion, stored)
        self.leased.pop(("demotion", demotion.demotion_id), None)
        directives = self.manager.finish_demotion(self.now, demotion.demotion_id, stored)
        self.naive.finish_demotion(self.now, demotion.demotion_id, stored)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    def write(self, demotion, keys):
        for key, size in zip(demotion.keys, demotion.nbytes, strict=True):
            if key in keys:
                self.inventory[REDIS].setdefault(key, (self.naive.known[key], size))

    @rule(demotion=demotions)
    def a_demotion_is_written_and_not_reported(self, demotion):
        demotion, epoch = demotion
        if epoch == self.epoch and demotion.demotion_id in self.naive.demotions and self.budgets[REDIS]:
            reserved = {copy.key for copy in self.naive.copies[REDIS].values() if copy.state == "reserved"}
            self.write(demotion, reserved)

    def all_is_demoted(self, most_bytes):
        for _ in range(100):
            demotion = self.manager.next_demotion(self.now, most_bytes)
            self.naive.next_demotion(self.now, most_bytes, demotion)
            if demotion is None:
                break
            self.carry_out(demotion.evict)
            self.finish(demotion, demotion.keys)
        else:
            raise AssertionError("demotions without end")

    @rule(prompt=prompts, replica=replicas, location=locations, target=saves)
    def promote(self, prompt, replica, location):
        keys = [key for key in hashes_of(prompt) if key in self.naive.known]
        offer = self.manager.promote(self.now, replica, location, keys)
        self.naive.promote(self.now, replica, location, keys, offer)
        self.carry_out(offer.evict)
        return (offer.save_id, location, offer.keys, self.epoch) if offer.keys else multiple()

    @rule()
    def relieve(self):
        directives = self.manager.relieve(self.now)
        self.naive.relieve(self.now, directives)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    @rule(empty=st.booleans())
    def redis_goes_away_or_comes_back(self, empty):
        if self.budgets[REDIS]:
            self.expire_now()
            self.manager.forget_holder(REDIS)
            self.naive.copies[REDIS].clear()
            self.away = dict(self.inventory[REDIS])
            self.lost(REDIS, list(self.away))
            self.budgets[REDIS] = 0
            return
        self.budgets[REDIS] = self.redis_budget
        self.manager.set_budget(REDIS, self.redis_budget)
        for key, (span, size) in sorted(self.away.items(), key=lambda item: item[1][0].start_block):
            if empty or key in self.naive.copies[REDIS]:
                continue
            accepted = self.manager.adopt(self.now, REDIS, [span], [size])
            self.naive.adopt(self.now, REDIS, [span], [size], accepted)
            self.keep(REDIS, accepted)

    @rule(location=locations, data=st.data())
    def dropped(self, location, data):
        self.expire_now()
        known = sorted({*self.inventory[location], *self.naive.copies[location]})
        keys = data.draw(st.lists(st.sampled_from(known), max_size=2, unique=True)) if known else [b"?" * 32]
        self.lost(location, keys)
        directives = self.manager.dropped(self.now, location, keys)
        self.naive.dropped(location, keys)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    @rule(step=st.sampled_from([0.0, 1.0, 12.0, 25.0, 100.0]))
    def time_passes(self, step):
        self.now += step
        self.expire_now()

    @rule(step=st.sampled_from([12.0, 25.0]))
    def time_passes_unnoticed(self, step):
        self.now += step

    @rule(tier=st.sampled_from([Tier.CPU, Tier.REDIS]))
    def clear(self, tier):
        directives = self.manager.clear({tier})
        self.naive.clear({tier})
        self.naive.carried_out(directives)
        self.carry_out(directives)

    @rule(location=locations)
    def lose_location(self, location):
        self.expire_now()
        self.manager.forget_holder(location)
        self.naive.copies[location].clear()
        self.lost(location, list(self.inventory[location]))
        self.away = {} if location == REDIS else self.away
        self.manager.set_budget(location, self.budgets[location])

    @rule(replica=replicas)
    def lose_replica(self, replica):
        self.manager.forget_replica(replica)
        self.naive.forget_replica(replica)
        self.leased = {lease_id: lease for lease_id, lease in self.leased.items() if lease[1] != replica}

    @rule(replica=replicas, prompt=prompts, change=st.sampled_from(["stored", "removed", "cleared"]))
    def device_changes(self, replica, prompt, change):
        held = self.naive.devices.setdefault(replica, set())
        if change == "stored":
            self.manager.device_stored(replica, hashes_of(prompt))
            held.update(hashes_of(prompt))
        elif change == "removed":
            self.manager.device_removed(replica, hashes_of(prompt)[-1:])
            held.difference_update(hashes_of(prompt)[-1:])
        else:
            self.manager.device_cleared(replica)
            held.clear()

    @rule()
    def manager_dies_and_the_tiers_report(self):
        self.new_manager()
        for location, held in self.inventory.items():
            spans = [span for span, _ in held.values()]
            nbytes = [size for _, size in held.values()]
            accepted = self.manager.adopt(self.now, location, spans, nbytes)
            self.naive.adopt(self.now, location, spans, nbytes, accepted)
            self.inventory[location] = {key: held[key] for key in accepted}

    @rule(limit=st.integers(1, 5), prompt=prompts)
    def mirror_catches_up(self, limit, prompt):
        while not self.mirror.apply(deltas := self.manager.deltas_since(self.mirror.seq, limit)) or deltas.events:
            pass
        report = self.manager.lookup(hashes_of(prompt))
        for replica in REPLICAS:
            hits = self.mirror.coverage(hashes_of(prompt), replica)
            device = report["device"].get(replica, 0)
            cpu, redis = max(device, report["cpu"]), max(device, report["cpu"], report["redis"])
            assert hits == (device, cpu - device, redis - cpu)

    @rule(limit=st.integers(1, 5))
    def mirror_polls_once(self, limit):
        self.mirror.apply(self.manager.deltas_since(self.mirror.seq, limit))

    @rule(prompt=prompts)
    def lookup_tells_the_truth(self, prompt):
        hashes = hashes_of(prompt)
        report = self.manager.lookup(hashes)
        for tier in (Tier.CPU, Tier.REDIS):
            held = set().union(*(self.naive.resident(place) for place in LOCATIONS if place.tier is tier))
            assert report[tier.value] == max((end for end, key in enumerate(hashes, 1) if key in held), default=0)
        for replica, leading in report["device"].items():
            held = [key in self.naive.devices.get(replica, ()) for key in hashes]
            assert leading == (held.index(False) if False in held else len(held))
        path = self.naive.ancestors(self.naive.deepest(hashes, self.naive.known))
        assert [segment["key"] for segment in reversed(report["segments"])] == [key.hex() for key in path]
        for segment in report["segments"]:
            uses = self.naive.uses[bytes.fromhex(segment["key"])]
            decayed = sum(2 ** ((request - self.naive.requests) / HALF_LIFE) for request in uses)
            assert segment["uses"] == pytest.approx(decayed)

    @invariant()
    def resident_is_what_was_committed_and_nothing_is_orphaned(self):
        told = {
            (Tier(event[1]), event[2], event[3]) for event in self.manager.deltas_since(-1, 1).events if len(event) == 6
        }
        for location in LOCATIONS:
            resident = {key for tier, holder, key in told if (tier, holder) == location}
            assert resident == self.naive.resident(location)
            assert resident <= set(self.inventory[location]), "published before its bytes were there"
            assert all(self.naive.known[key].parent in {None, *resident} for key in resident), "an orphan"

    @invariant()
    def exactly_the_unleased_leaves_may_be_evicted(self):
        for location, policy in zip(LOCATIONS, CheckedLfu.made, strict=True):
            assert {copy.node.key for copy in policy.exposed} == self.naive.leaves(location)

    @invariant()
    def budgets_hold(self):
        stats = self.manager.stats(self.now)
        for found in stats["locations"]:
            location = Location(Tier(found["tier"]), found["holder"])
            promised = [copy.nbytes for copy in self.naive.copies[location].values() if copy.state == "reserved"]
            assert found["bytes"] == self.naive.used_bytes(location) <= self.budgets[location]
            assert found["reserved_bytes"] == sum(promised)
            assert found["segments"] == len(self.naive.resident(location))
            waiting = {key for place, key in self.naive.due if place == location}
            if location == REDIS:  # what was reserved is cleared before its demotion has ended
                waiting |= {copy.key for *_, targets in self.naive.demotions.values() for copy in targets}
            really_held = sum(size for key, (_, size) in self.inventory[location].items() if key not in waiting)
            assert really_held <= self.budgets[location]
        stored = {key for held in self.naive.copies.values() for key in held}
        assert stats["nodes"] == len(self.naive.known)
        assert stats["ghosts"] == len(self.naive.known.keys() - stored)
        assert stats["leases"] == len(self.naive.leases)
        assert stats["demotions"] == len(self.naive.demotions)
        assert self.budgets[REDIS] or stats["demotion_queue"] == 0

    def teardown(self):
        """Once all has ended, nothing is leased, reserved, or held without the index knowing."""
        if not hasattr(self, "manager"):
            return
        self.now += 1000.0
        self.expire_now()
        self.exactly_the_unleased_leaves_may_be_evicted()
        stats = self.manager.stats(self.now)
        assert (stats["leases"], stats["reservations"], stats["demotions"]) == (0, 0, 0)
        for found in stats["locations"]:
            location = Location(Tier(found["tier"]), found["holder"])
            assert found["reserved_bytes"] == 0
            assert self.inventory[location].keys() == self.naive.copies[location].keys()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=200, stateful_step_count=40)
