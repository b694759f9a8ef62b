"""What the model learns of reuse, fed without a manager; and what it keeps, in one with tenants."""

import gc
import random

import pytest
from policy_world import World

from kvmanager import manager_parts
from kvmanager.config import ManagerConfig
from kvmanager.eviction import reuse_model
from kvmanager.eviction.policies.lfu import LearnedLfu, _Rank
from kvmanager.eviction.policies.lru import Lru
from kvmanager.eviction.reuse_model import AGES, EDGES, Cohort, Profile, ReuseModel
from kvmanager.index.locations import Location, Tier
from kvmanager.index.nodes import Node
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.spans import NodeKind, SegmentSpan, split_segments


class Stream:
    """Requests of one segment each."""

    def __init__(self):
        self.model = ReuseModel()
        self.nodes = {}

    def request(self, number):
        self.model.request(1)
        node = self.nodes.get(number)
        if node is not None:
            self.model.used(node)
            self.model.offered(1)
            return node
        key = number.to_bytes(32, "little")
        node = self.nodes[number] = Node(SegmentSpan(key, None, 0, 1, NodeKind.REQUEST, key[:8]), score=0.0)
        self.model.offered(1)
        self.model.made(node)
        return node


def test_in_a_loop_a_segment_is_worth_more_the_nearer_its_turn_comes():
    stream = Stream()
    for number in range(50 * 40):
        node = stream.request(number % 50)
    index = stream.model.cohort_of(node).profile.index
    at = max(age for age in range(AGES) if EDGES[age] <= 50)
    assert index[at] > 2 * index[0]
    assert index[0] == pytest.approx(1 / 50, rel=0.5)  # kept for the whole round, which is not due in the next interval


@pytest.mark.parametrize("kind", [NodeKind.REQUEST, NodeKind.ANSWER])
def test_states_look_like_what_they_follow_on(kind):
    """Those behind an answer are worth what the answer is: both are of use only if the conversation goes on."""
    looks = []
    for own in (kind, NodeKind.STATE):
        stream = Stream()
        above = Node(SegmentSpan(b"a" * 32, None, 0, 1, kind, b"a" * 8), score=0.0)
        node = Node(SegmentSpan(b"b" * 32, above.key, 1, 1, own, b"b" * 8), score=0.0)
        node.parent = above
        stream.model.request(2)
        stream.model.offered(2)
        stream.model.made(above)
        stream.model.made(node)
        looks.append(stream.model.cohort_of(node).profile.key)
    assert looks[0] == looks[1]


def test_what_is_never_used_again_is_worth_less_than_before_anything_was_learned():
    stream = Stream()
    first = stream.model.cohort_of(stream.request(0)).profile.index[0]
    for number in range(1, 500):
        node = stream.request(number)
    assert stream.model.cohort_of(node).index < first / 4


def test_more_uses_are_worth_more_before_anything_is_learned():
    stream = Stream()
    once = stream.model.cohort_of(stream.request(1)).index
    stream.request(1)
    assert stream.model.cohort_of(stream.request(1)).index > once


def test_a_forgotten_node_does_not_count_as_one_that_was_not_used_again():
    stream = Stream()
    node = stream.request(1)
    cohort = stream.model.cohort_of(node)
    stream.model.forgot(node)
    assert cohort.alive == 0
    assert node.cohort is None


@pytest.mark.parametrize("number", [1, 300])
def test_a_cohort_is_in_the_interval_of_its_age(number):
    stream = Stream()
    cohort = stream.model.cohort_of(stream.request(0))
    for later in range(1, number + 1):
        stream.request(later)
    assert EDGES[cohort.age] <= number < EDGES[cohort.age + 1]


class NeverMade(ReuseModel):
    def __init__(self):
        raise AssertionError("a model that nobody orders by")


class AnotherOrder(Lru):
    """A policy of the user's."""


@pytest.mark.parametrize("policy", ["lru", "decayed-lfu", f"{__name__}:AnotherOrder"])
def test_where_no_policy_orders_by_the_model_there_is_none_and_nothing_is_fed(policy, monkeypatch):
    monkeypatch.setattr(manager_parts, "ReuseModel", NeverMade)
    world = World(policy, 10, max_ghosts=5)
    assert world.hit_rate([(1, 2, 3)] * 3 + [(4, 5, number) for number in range(10, 30)]) > 0
    nodes = world.manager._trie.nodes.values()
    assert nodes
    assert all((node.cohort, node.uses, node.branches) == (None, 1, 0) for node in nodes)


def test_the_default_orders_by_the_model(monkeypatch):
    world = World("lfu", 10)
    world.hit_rate([(1, 2, 3)] * 3)
    assert {node.uses for node in world.manager._trie.nodes.values()} == {3}
    monkeypatch.setattr(manager_parts, "ReuseModel", NeverMade)
    with pytest.raises(AssertionError, match="nobody orders by"):
        World("lfu", 10)


CPU = Location(Tier.CPU, "node")
YOUNG_EDGES = (*(edge / 100 for edge in EDGES),)


def churning(policy, requests, monkeypatch):
    """A manager with a tenant that stored one prompt and went, and others that come and go; how much it keeps."""
    monkeypatch.setattr(reuse_model, "EDGES", YOUNG_EDGES)
    manager = KVManager(ManagerConfig(2, eviction_policy=policy, max_ghosts=2000), epoch=1)
    manager.set_budget(CPU, 60)
    manager.set_quotas(Tier.CPU, {"idle": 10})
    rng = random.Random(0)

    def serve(tenant):
        hashes = [rng.randbytes(32) for _ in range(2 * rng.randint(1, 6))]
        manager.release(manager.plan(0, "replica", "node", PlanQuery(hashes)).lease_id)
        spans = split_segments(hashes, 0, len(hashes), 2, len(hashes), tenant)
        offer = manager.offer(0, "replica", CPU, spans, [1] * len(spans))
        manager.commit(0, CPU, offer.keys, [1] * len(offer.keys))

    def kept():
        gc.collect()
        counts = dict.fromkeys((Cohort, Profile, _Rank, LearnedLfu), 0)
        for each in gc.get_objects():
            if type(each) in counts:
                counts[type(each)] += 1
        return counts

    gc.freeze()  # what other tests have left is neither collected nor counted
    try:
        serve("idle")
        seen = []
        for _ in range(2):
            for _ in range(requests):
                serve("busy")
            seen.append(kept())
    finally:
        gc.unfreeze()
    return manager, seen


def test_an_idle_tenant_beside_churn_makes_the_model_keep_nothing_more(monkeypatch):
    """What is kept follows from the segments that are known, two thousand here, not from the requests there were."""
    _, (early, late) = churning("lfu", 2000, monkeypatch)
    assert early[Cohort] < 2500
    for kind, number in late.items():
        assert number <= 1.2 * early[kind] + 20, kind


def test_a_look_that_no_known_segment_has_is_not_kept():
    stream, rng = Stream(), random.Random(0)
    for _ in range(3000):
        stream.request(int(40 * rng.random() ** 3))
    looks = len(stream.model._profiles)
    for node in stream.nodes.values():
        stream.model.forgot(node)
    for number in range(50):
        stream.request(1000 + number % 2)
    assert looks > 20
    assert len(stream.model._profiles) < looks / 4
