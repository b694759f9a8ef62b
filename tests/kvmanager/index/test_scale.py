"""What must not grow with the index: the work of a request, counted in calls; and the memory of a segment."""

import gc
import random
import tracemalloc

import pytest
from counted_calls import calls_of

from kvmanager.config import ManagerConfig
from kvmanager.eviction.policies import policy_names
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.spans import split_segments
from tests.sizes import FULL_INDEX

CPU = Location(Tier.CPU, "node")
SEGMENTS, BLOCKS = 128, 8


def fill(manager, num_prompts, rng):
    """Store prompts of 128 segments with random hashes; return the last one's."""
    for _ in range(num_prompts):
        # Only the hashes that end segments are ever looked at here: the others need not be random.
        ends = [rng.randbytes(32) for _ in range(SEGMENTS)]
        hashes = [ends[block // BLOCKS] for block in range(SEGMENTS * BLOCKS)]
        serve(manager, hashes)
    return hashes


def serve(manager, hashes):
    plan = manager.plan(0, "replica", "node", PlanQuery(hashes))
    manager.release(plan.lease_id)
    spans = split_segments(hashes, 0, len(hashes), BLOCKS, len(hashes))
    nbytes = [10**6 + index for index in range(len(spans))]
    offer = manager.offer(0, "replica", CPU, spans, nbytes)
    sizes = {span.key: size for span, size in zip(spans, nbytes, strict=True)}
    manager.commit(0, CPU, offer.keys, [sizes[key] for key in offer.keys])
    return plan


def full_manager(num_prompts, policy):
    manager = KVManager(ManagerConfig(BLOCKS, eviction_policy=policy), epoch=1)
    manager.set_budget(CPU, num_prompts * sum(range(10**6, 10**6 + SEGMENTS)))
    return manager, fill(manager, num_prompts, random.Random(0))


@pytest.mark.parametrize("policy", policy_names())
def test_a_request_costs_the_same_in_a_small_and_in_a_large_full_index(policy):
    (small, small_hit), (large, large_hit) = full_manager(4, policy), full_manager(FULL_INDEX, policy)
    assert large.stats(0)["locations"][0]["segments"] == FULL_INDEX * SEGMENTS
    hit = [calls_of(lambda m=m, h=h: serve(m, h)) for m, h in ((small, small_hit), (large, large_hit))]
    assert hit[1] <= 1.05 * hit[0]
    rng = random.Random(1)
    for manager in (small, large):  # until what is stored is old enough to make room
        for _ in range(1000):
            manager.plan(0, "replica", "node", PlanQuery([rng.randbytes(32)]))
    miss = [calls_of(lambda m=m: fill(m, 1, rng)) for m in (small, large)]
    assert large.stats(0)["counters"]["evicted_segments"] >= SEGMENTS
    assert miss[1] <= 1.1 * miss[0]


def test_a_segment_takes_at_most_500_bytes_and_32_for_each_block():
    rng = random.Random(0)
    gc.collect()
    tracemalloc.start()
    manager = KVManager(ManagerConfig(BLOCKS, max_deltas=1), epoch=1)
    manager.set_budget(CPU, 10**15)
    before, _ = tracemalloc.get_traced_memory()
    hashes = fill(manager, 100, rng)
    del hashes
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / manager.stats(0)["nodes"] <= 500 + 32 * BLOCKS
