"""The real manager beside the naive one, and tiers that carry out its orders: one method for each thing that happens.

Two drive it: Hypothesis (`test_manager_properties.py`), which checks everything after each step and shrinks what it
finds, and a fast random driver (`test_million.py`). Arguments are plain values, so that each run can be repeated.
"""

import checked_policies
import naive_chunks
import naive_limits
import naive_reach
import naive_redis
import naive_states
import pytest
from checked_policies import POLICIES
from naive_copy import coded_bytes, raw_bytes
from naive_manager import HALF_LIFE, NaiveManager, hashes_of

from kvmanager.config import ManagerConfig
from kvmanager.eviction.pins import PinBudgetError, UnknownKeyError
from kvmanager.extensions import PLAN_EXTENSIONS, plan_extensions
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.segments.keys import state_name

LOCATIONS = (Location(Tier.CPU, "node0"), Location(Tier.CPU, "node1"), REDIS)
REPLICAS = ("replica0", "replica1")
TENANTS = ("", "tenant1", "tenant2")
LEASE_S, SAVE_S = 30.0, 20.0


class ManagerWorld:
    """Each method does one thing to both managers, compares their answers, and lets the tiers carry out the orders."""

    def __init__(self, policy, blocks_per_segment, budgets, min_uses, high_water, pin_budget, seed=0):
        self.policy, self.seed, self.pin_budget = policy, seed, pin_budget
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
            block_tokens=1,
            lease_s=LEASE_S,
            save_s=SAVE_S,
            half_life_requests=HALF_LIFE,
            max_deltas=8,
            eviction_policy=f"{checked_policies.__name__}:{POLICIES[self.policy].__name__}",
            policy_seed=self.seed,
            cpu_high_water=self.high_water,
            redis_min_uses=self.min_uses,
            pin_budget_bytes=self.pin_budget,
        )
        self.manager = KVManager(config, self.epoch, extensions=plan_extensions(PLAN_EXTENSIONS))
        self.visits = naive_reach.Visits(self.manager._catalog)
        self.leased = {}  # lease id -> (end, replica, {(location, key)})
        self.naive = NaiveManager(
            self.budgets,
            self.blocks_per_segment,
            LEASE_S,
            SAVE_S,
            self.high_water,
            self.pin_budget,
            coldest_first=self.policy == "coldest first",
            now=self.now,
        )
        checked_policies.evictions = self.naive.evicted
        for location, budget in self.budgets.items():
            self.manager.set_budget(location, budget)

    # What tiers do

    def carry_out(self, directives):
        for order in directives:
            position = {key: place for place, key in enumerate(order.keys)}
            for key in order.keys:
                found = self.inventory[order.source].pop(key, None)
                assert found or order.source == REDIS, "only a demotion may have left less than was reserved"
                parent = found[0].parent if found else None
                if found and self.naive.known[key].parent == parent:  # else what is left of another cut
                    assert position.get(parent, len(position)) > position[key], "a parent went before its child"
                for end, _, held in self.leased.values():
                    assert end <= self.now or (order.source, key) not in held, "a leased segment was evicted"

    def lost(self, location, keys):
        for key in keys:
            self.inventory[location].pop(key, None)
            for _, _, held in self.leased.values():
                held.discard((location, key))

    def keep(self, location, accepted):
        for key in accepted:
            self.inventory[location][key] = (self.naive.known[key], self.naive.copies[location][key].nbytes)

    def write(self, demotion, keys):
        for key, size in zip(demotion.keys, demotion.nbytes, strict=True):
            there = self.naive.copies[REDIS].get(key)
            if key in keys and not (there is not None and there.save_id):  # a real Redis has no other writers
                size = coded_bytes(key, size)
                if there is not None:  # reserved anew since: a real segment has one size, not any
                    size = min(size, there.nbytes)
                self.inventory[REDIS].setdefault(key, (self.naive.known[key], size))

    # Loading and saving

    def plan(self, prompt, tenant, device, replica, node):
        """Return the lease, or None."""
        hashes = hashes_of(prompt, tenant)
        device = min(device, len(hashes))
        plan = self.manager.plan(self.now, replica, node, PlanQuery(hashes, device_blocks=device))
        self.naive.plan(self.now, replica, node, hashes, device, plan, self.visits.take())
        return self.take_lease(replica, plan)

    def plan_blended(self, replica, **prompt):
        """As `plan`, with ``chunks``: (gap before it, tokens) of each."""
        return self.take_lease(replica, naive_chunks.plan_both(self, replica=replica, **prompt))

    def plan_with_states(self, replica, **prompt):
        """As `plan`, for an engine with states; ``message``: the block with which the prompt's last message begins."""
        return self.take_lease(replica, naive_states.plan_both(self, replica=replica, **prompt))

    def reserve(self, prompt, tenant, replica, node):
        """Return the lease, or None."""
        hashes = hashes_of(prompt, tenant)
        path, _, _ = self.manager._search.find(hashes, node)
        plan = self.manager.reserve(self.now, replica, node, hashes)
        self.naive.plan(self.now, replica, node, hashes, 0, plan, [link.key for link in path], counts=False)
        return self.take_lease(replica, plan)

    def take_lease(self, replica, plan):
        if not plan.lease_id:
            return None
        loads = naive_states.loads_of(plan), *(chunk.loads for chunk in naive_chunks.chunks_of(plan))
        held = {(one.location, one.key) for part in loads for one in part}
        self.leased[plan.lease_id] = (self.now + LEASE_S, replica, held)
        return plan.lease_id, self.epoch

    def release(self, lease):
        lease_id, epoch = lease
        if epoch == self.epoch:
            self.leased.pop(lease_id, None)
            self.manager.release(lease_id)
            self.naive.release(lease_id)

    def offer(self, prompt, tenant, start, num_prompt, replica, location, sizes):
        """Return the save, or None."""
        spans = naive_reach.cut(self.naive, hashes_of(prompt, tenant), tenant, start, num_prompt)
        return self.offer_spans(spans, replica, location, sizes)

    def offer_spans(self, spans, replica, location, sizes):
        nbytes = sizes[: len(spans)]
        offer = self.manager.offer(self.now, replica, location, spans, nbytes)
        self.naive.offer(self.now, replica, location, spans, nbytes, offer)
        self.carry_out(offer.evict)
        return (offer.save_id, location, offer.keys, self.epoch) if offer.keys else None

    def save_states(self, prompt, tenant, boundary, replica, location, size):
        """Offer the states behind the first blocks of a prompt; return the save, or None."""
        hashes = hashes_of(prompt, tenant)
        spans = naive_states.cut(self, location, hashes, min(boundary, len(hashes)), tenant)
        return self.offer_spans(spans, replica, location, [size])

    def serve_with_states(self, prompt, tenant, boundaries, replica, node, location):
        """Store a prompt and its states at some boundaries, as far as there is room; plan it, and return the lease."""
        self.serve(prompt, tenant, len(prompt), location, 1, demote=False)
        for boundary in boundaries:
            save = self.save_states(prompt, tenant, boundary, replica, location, 1)
            if save is not None:
                self.commit(save, [0], [1])
        return self.plan_with_states(replica, prompt=prompt, tenant=tenant, node=node, message=0)

    def serve(self, prompt, tenant, num_prompt, location, size, demote):
        """Plan, promote, compute and store a whole prompt, as a healthy server does, and make use of Redis."""
        hashes = hashes_of(prompt, tenant)
        plan = self.manager.plan(self.now, "replica0", "node0", PlanQuery(hashes))
        self.naive.plan(self.now, "replica0", "node0", hashes, 0, plan, self.visits.take())
        if location != REDIS:
            keys = [segment.key for segment in plan.segments if segment.location == REDIS]
            promotion = self.manager.prefetch(self.now, "replica0", location, keys)
            self.naive.prefetch(self.now, "replica0", location, keys, promotion)
            self.carry_out(promotion.evict)
            nbytes = [self.naive.copies[location][key].nbytes for key in promotion.keys]
            accepted = self.manager.commit(self.now, location, promotion.keys, nbytes)
            self.naive.commit(self.now, location, promotion.keys, nbytes, accepted)
            self.keep(location, accepted)
        spans = self.manager.cut(location, hashes, 0, len(hashes), num_prompt, tenant)
        naive_reach.nothing_is_cut_twice(self.naive, location, hashes, spans)
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

    def commit(self, save, order, sizes):
        """``order``: positions of some of the keys."""
        _, location, keys, _ = save
        keys = [keys[position] for position in order]
        nbytes = sizes[: len(keys)]
        accepted = self.manager.commit(self.now, location, keys, nbytes)
        self.naive.commit(self.now, location, keys, nbytes, accepted)
        self.keep(location, accepted)

    def adopt(self, prompt, tenant, start, num_prompt, location, sizes):
        spans = naive_reach.cut(self.naive, hashes_of(prompt, tenant), tenant, start, num_prompt)
        self.tell(location, spans, sizes[: len(spans)])

    def tell(self, location, spans, nbytes):
        """Return the keys that a tier shall keep of what it reports."""
        raw = [raw_bytes(location, span.key, size) for span, size in zip(spans, nbytes, strict=True)]
        accepted = self.manager.adopt(self.now, location, spans, nbytes, raw)
        self.naive.adopt(self.now, location, spans, nbytes, raw, accepted)
        self.keep(location, accepted)
        return accepted

    def abandon(self, save):
        if save[3] == self.epoch:
            self.manager.abandon(save[0])
            self.naive.abandon(save[0])

    # Redis

    def next_demotion(self, most_bytes):
        """Return the demotion, or None."""
        demotion = self.manager.next_demotion(self.now, most_bytes)
        naive_redis.next_demotion(self.naive, self.now, most_bytes, demotion)
        if demotion is None:
            return None
        self.carry_out(demotion.evict)
        held = {(demotion.source, key) for key in demotion.keys}
        self.leased["demotion", demotion.demotion_id] = (self.now + SAVE_S, "", held)
        return demotion, self.epoch

    def finish_demotion(self, demotion, stored):
        """``stored``: a truth for each key. Some come late, and twice."""
        demotion, epoch = demotion
        if epoch == self.epoch:
            keys = [key for key, kept in zip(demotion.keys, stored, strict=False) if kept]
            self.finish(demotion, keys, too_large=[key for key in keys if key[0] % 16 == 0])

    def finish(self, demotion, stored, too_large=()):
        if self.budgets[REDIS]:
            self.write(demotion, stored)
        self.leased.pop(("demotion", demotion.demotion_id), None)
        sizes = dict(zip(demotion.keys, demotion.nbytes, strict=True))
        sizes = {key: sizes[key] + 1 if key in too_large else coded_bytes(key, sizes[key]) for key in stored}
        directives = self.manager.finish_demotion(self.now, demotion.demotion_id, sizes)
        naive_redis.finish_demotion(self.naive, self.now, demotion.demotion_id, sizes)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    def a_demotion_is_written_and_not_reported(self, demotion):
        demotion, epoch = demotion
        if epoch == self.epoch and demotion.demotion_id in self.naive.demotions and self.budgets[REDIS]:
            reserved = {copy.key for copy in self.naive.copies[REDIS].values() if copy.state == "reserved"}
            self.write(demotion, reserved)

    def all_is_demoted(self, most_bytes):
        for _ in range(100):
            demotion = self.manager.next_demotion(self.now, most_bytes)
            naive_redis.next_demotion(self.naive, self.now, most_bytes, demotion)
            if demotion is None:
                break
            self.carry_out(demotion.evict)
            self.finish(demotion, demotion.keys)
        else:
            raise AssertionError("demotions without end")

    def prefetch(self, prompt, tenant, replica, location):
        """Return the save, or None."""
        hashes = hashes_of(prompt, tenant)
        keys = [
            key
            for key, span in self.naive.known.items()
            if naive_reach.part(self.naive, hashes, key) > span.start_block
        ]
        keys += [name for name in map(state_name, hashes) if name in self.naive.known]
        offer = self.manager.prefetch(self.now, replica, location, keys)
        self.naive.prefetch(self.now, replica, location, keys, offer)
        self.carry_out(offer.evict)
        return (offer.save_id, location, offer.keys, self.epoch) if offer.keys else None

    def relieve(self):
        directives = self.manager.relieve(self.now)
        naive_redis.relieve(self.naive, self.now, directives)
        self.naive.carried_out(directives)
        self.carry_out(directives)

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
            self.tell(REDIS, [span], [size])

    # Quotas and pins

    def set_quotas(self, tier, quotas):
        if naive_limits.set_quotas(self.naive, tier, quotas):
            self.manager.set_quotas(tier, quotas)
        else:
            before = self.manager.stats(self.now)
            with pytest.raises(ValueError, match="add up to"):
                self.manager.set_quotas(tier, quotas)
            assert self.manager.stats(self.now) == before

    def pin(self, prompts, tenant, ttl_s):
        keys = [hashes_of(prompt, tenant)[-1] for prompt in prompts]
        expected = naive_limits.pin(self.naive, self.now, keys, ttl_s)
        refusals = {"unknown": UnknownKeyError, "budget": PinBudgetError}
        if expected in refusals:
            with pytest.raises(refusals[expected]):
                self.manager.pin(self.now, keys, ttl_s)
        else:
            assert self.manager.pin(self.now, keys, ttl_s).nbytes == expected

    def unpin(self, prompts, tenant):
        keys = [hashes_of(prompt, tenant)[-1] for prompt in prompts]
        expected = naive_limits.unpin(self.naive, self.now, keys)
        if expected == "unknown":
            with pytest.raises(UnknownKeyError):
                self.manager.unpin(self.now, keys)
        else:
            assert self.manager.unpin(self.now, keys) == expected

    # Losses, and time

    def expire_now(self):
        directives = self.manager.expire(self.now)
        self.naive.expired(self.now)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    def dropped(self, location, positions):
        """``positions``: which of the keys there, in their order, are gone."""
        self.expire_now()
        known = sorted({*self.inventory[location], *self.naive.copies[location]})
        keys = list({known[position % len(known)]: None for position in positions}) if known else [b"?" * 32]
        self.lost(location, keys)
        directives = self.manager.dropped(self.now, location, keys)
        self.naive.dropped(location, keys)
        self.naive.carried_out(directives)
        self.carry_out(directives)

    def time_passes(self, step):
        self.now += step
        self.expire_now()

    def time_passes_unnoticed(self, step):
        self.now += step

    def clear(self, tier):
        directives = self.manager.clear({tier})
        self.naive.clear({tier})
        self.naive.carried_out(directives)
        self.carry_out(directives)

    def lose_location(self, location):
        self.expire_now()
        self.manager.forget_holder(location)
        self.naive.copies[location].clear()
        self.lost(location, list(self.inventory[location]))
        self.away = {} if location == REDIS else self.away
        self.manager.set_budget(location, self.budgets[location])

    def lose_replica(self, replica):
        self.manager.forget_replica(replica)
        self.naive.forget_replica(replica)
        self.leased = {lease_id: lease for lease_id, lease in self.leased.items() if lease[1] != replica}

    def device_changes(self, replica, prompt, tenant, change):
        held = self.naive.devices.setdefault(replica, set())
        hashes = hashes_of(prompt, tenant)
        if change == "stored":
            self.manager.device_stored(replica, hashes)
            held.update(hashes)
        elif change == "removed":
            self.manager.device_removed(replica, hashes[-1:])
            held.difference_update(hashes[-1:])
        else:
            self.manager.device_cleared(replica)
            held.clear()

    def manager_dies_and_the_tiers_report(self):
        self.new_manager()
        for location, held in self.inventory.items():
            spans = [span for span, _ in held.values()]
            nbytes = [size for _, size in held.values()]
            accepted = self.tell(location, spans, nbytes)
            self.inventory[location] = {key: held[key] for key in accepted}

    # Reports

    def mirror_catches_up(self, limit, prompt, tenant):
        while not self.mirror.apply(deltas := self.manager.deltas_since(self.mirror.position, limit)) or deltas.more:
            pass
        report = self.manager.lookup(hashes_of(prompt, tenant))
        for replica in REPLICAS:
            hits = self.mirror.coverage(hashes_of(prompt, tenant), replica)
            device = report["device"].get(replica, 0)
            cpu, redis = max(device, report["cpu"]), max(device, report["cpu"], report["redis"])
            assert hits == (device, cpu - device, redis - cpu)

    def mirror_polls_once(self, limit):
        self.mirror.apply(self.manager.deltas_since(self.mirror.position, limit))
