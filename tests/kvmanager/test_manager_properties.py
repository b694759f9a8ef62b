"""Random operations against the naive manager: after each one, both agree and every invariant holds."""

import hypothesis.strategies as st
import manager_invariants
from checked_policies import POLICIES
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from manager_world import LOCATIONS, REPLICAS, TENANTS, ManagerWorld

from kvmanager.index.locations import Tier
from tests.sizes import RULES_RUN

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
tenants = st.sampled_from(TENANTS)
locations = st.sampled_from((LOCATIONS[0], *LOCATIONS))  # crowd the first one
tiers = st.sampled_from([Tier.CPU, Tier.REDIS])
replicas = st.sampled_from(REPLICAS)
size_lists = st.lists(st.integers(1, 3), min_size=6, max_size=6)
blocks = st.integers(0, 7)
quotas = st.dictionaries(st.sampled_from(TENANTS[1:]), st.integers(0, 6))


def handle(found):
    return multiple() if found is None else found


class ManagerMachine(RuleBasedStateMachine):
    saves = Bundle("saves")
    leases = Bundle("leases")
    demotions = Bundle("demotions")

    @initialize(
        policy=st.sampled_from(["coldest first", *POLICIES]),
        blocks_per_segment=st.integers(1, 3),
        budgets=st.lists(st.integers(2, 10), min_size=3, max_size=3),
        min_uses=st.sampled_from([1.0, 1.0, 2.0]),
        high_water=st.sampled_from([0.3, 0.7, 1.0]),
        pin_budget=st.integers(0, 8),
        cpu_quotas=st.one_of(st.just({}), quotas),
    )
    def start(self, policy, blocks_per_segment, budgets, min_uses, high_water, pin_budget, cpu_quotas):
        self.world = ManagerWorld(policy, blocks_per_segment, budgets, min_uses, high_water, pin_budget)
        self.world.set_quotas(Tier.CPU, cpu_quotas)

    @rule(
        target=leases,
        prompt=prompts,
        tenant=tenants,
        device=blocks,
        replica=replicas,
        node=st.sampled_from(["node0", "x"]),
    )
    def plan(self, **arguments):
        return handle(self.world.plan(**arguments))

    @rule(
        target=leases,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        tenant=tenants,
        device=st.integers(0, 2),
        replica=replicas,
        node=st.sampled_from(["node0", "x"]),
        chunks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=3),
    )
    def plan_blended(self, **arguments):
        return handle(self.world.plan_blended(**arguments))

    @rule(
        target=leases,
        prompt=prompts,
        tenant=tenants,
        replica=replicas,
        node=st.sampled_from(["node0", "x"]),
        message=st.integers(0, 6),
    )
    def plan_with_states(self, **arguments):
        return handle(self.world.plan_with_states(**arguments))

    @rule(
        target=leases,
        prompt=prompts,
        tenant=tenants,
        boundaries=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        replica=replicas,
        node=st.sampled_from(["node0", "x"]),
        location=locations,
    )
    def serve_with_states(self, **arguments):
        return handle(self.world.serve_with_states(**arguments))

    @rule(target=leases, prompt=prompts, tenant=tenants, replica=replicas, node=st.sampled_from(["node0", "x"]))
    def reserve(self, **arguments):
        return handle(self.world.reserve(**arguments))

    @rule(lease=leases)
    def release(self, lease):
        self.world.release(lease)

    @rule(
        target=saves,
        prompt=prompts,
        tenant=tenants,
        start=blocks,
        num_prompt=blocks,
        replica=replicas,
        location=locations,
        sizes=size_lists,
    )
    def offer(self, **arguments):
        return handle(self.world.offer(**arguments))

    @rule(
        prompt=prompts,
        tenant=tenants,
        num_prompt=st.integers(0, 6),
        location=locations,
        size=st.integers(1, 3),
        demote=st.booleans(),
    )
    def serve(self, **arguments):
        self.world.serve(**arguments)

    @rule(
        target=saves,
        prompt=prompts,
        tenant=tenants,
        boundary=st.integers(1, 6),
        replica=replicas,
        location=locations,
        size=st.integers(1, 3),
    )
    def save_states(self, **arguments):
        return handle(self.world.save_states(**arguments))

    @rule(save=saves, data=st.data(), sizes=size_lists)
    def commit(self, save, data, sizes):
        order = data.draw(st.permutations(range(len(save[2]))))
        self.world.commit(save, order[: data.draw(st.integers(1, len(order)))], sizes)

    @rule(prompt=prompts, tenant=tenants, start=blocks, num_prompt=blocks, location=locations, sizes=size_lists)
    def adopt(self, **arguments):
        self.world.adopt(**arguments)

    @rule(save=consumes(saves))
    def abandon(self, save):
        self.world.abandon(save)

    @rule(target=demotions, most_bytes=st.integers(0, 8))
    def next_demotion(self, most_bytes):
        return handle(self.world.next_demotion(most_bytes))

    @rule(demotion=demotions, stored=st.lists(st.sampled_from([True, True, False]), min_size=8, max_size=8))
    def finish_demotion(self, demotion, stored):
        self.world.finish_demotion(demotion, stored)

    @rule(demotion=demotions)
    def a_demotion_is_written_and_not_reported(self, demotion):
        self.world.a_demotion_is_written_and_not_reported(demotion)

    @rule(target=saves, prompt=prompts, tenant=tenants, replica=replicas, location=locations)
    def prefetch(self, **arguments):
        return handle(self.world.prefetch(**arguments))

    @rule()
    def relieve(self):
        self.world.relieve()

    @rule(empty=st.booleans())
    def redis_goes_away_or_comes_back(self, empty):
        self.world.redis_goes_away_or_comes_back(empty)

    @rule(tier=tiers, quotas=quotas)
    def set_quotas(self, tier, quotas):
        self.world.set_quotas(tier, quotas)

    @rule(prompts=st.lists(prompts, min_size=1, max_size=2), tenant=tenants, ttl_s=st.sampled_from([5.0, 50.0, 500.0]))
    def pin(self, **arguments):
        self.world.pin(**arguments)

    @rule(prompts=st.lists(prompts, min_size=1, max_size=2), tenant=tenants)
    def unpin(self, **arguments):
        self.world.unpin(**arguments)

    @rule(location=locations, positions=st.lists(st.integers(0, 20), max_size=2))
    def dropped(self, **arguments):
        self.world.dropped(**arguments)

    @rule(step=st.sampled_from([0.0, 1.0, 12.0, 25.0, 100.0]))
    def time_passes(self, step):
        self.world.time_passes(step)

    @rule(step=st.sampled_from([12.0, 25.0]))
    def time_passes_unnoticed(self, step):
        self.world.time_passes_unnoticed(step)

    @rule(tier=tiers)
    def clear(self, tier):
        self.world.clear(tier)

    @rule(location=locations)
    def lose_location(self, location):
        self.world.lose_location(location)

    @rule(replica=replicas)
    def lose_replica(self, replica):
        self.world.lose_replica(replica)

    @rule(replica=replicas, prompt=prompts, tenant=tenants, change=st.sampled_from(["stored", "removed", "cleared"]))
    def device_changes(self, **arguments):
        self.world.device_changes(**arguments)

    @rule()
    def manager_dies_and_the_tiers_report(self):
        self.world.manager_dies_and_the_tiers_report()

    @rule(limit=st.integers(1, 5), prompt=prompts, tenant=tenants)
    def mirror_catches_up(self, **arguments):
        self.world.mirror_catches_up(**arguments)

    @rule(limit=st.integers(1, 5))
    def mirror_polls_once(self, limit):
        self.world.mirror_polls_once(limit)

    @rule(prompt=prompts, tenant=tenants)
    def lookup_tells_the_truth(self, **arguments):
        manager_invariants.lookup_tells_the_truth(self.world, **arguments)

    @invariant()
    def resident_is_what_was_committed_and_nothing_is_orphaned(self):
        manager_invariants.resident_is_what_was_committed_and_nothing_is_orphaned(self.world)

    @invariant()
    def exactly_the_free_leaves_may_be_evicted(self):
        manager_invariants.exactly_the_free_leaves_may_be_evicted(self.world)

    @invariant()
    def budgets_and_counts_hold(self):
        manager_invariants.budgets_and_counts_hold(self.world)

    def teardown(self):
        if hasattr(self, "world"):
            manager_invariants.end(self.world)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=RULES_RUN, stateful_step_count=40)
