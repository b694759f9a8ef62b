"""Every eviction policy: what may go goes, each in the order of its algorithm, and what the default is better at."""

import random

import pytest
from policy_world import World, conversations, loop, one_shots, zipf

from kvmanager.eviction.policies import EvictionPolicy, PolicySetting, find_policy, make_policy, policy_names
from kvmanager.eviction.reuse_model import ReuseModel
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.segments.spans import NodeKind, SegmentSpan
from load_tests.simulator.policies import served_name, simulated_names

NAMES = simulated_names()


class Shelf:
    """Copies without a trie around them, in a cache that one policy orders; all are leaves."""

    def __init__(self, name, capacity=10):
        self.clock = HotnessClock(1000)
        self.reuse = ReuseModel()
        self.policy = make_policy(served_name(name), PolicySetting(self.clock, lambda: capacity, 0, self.reuse))
        self.capacity = capacity
        self.nodes, self.copies = {}, {}
        self.log = []

    def access(self, number):
        """Use a key, and store it if it is not there; return whether it was."""
        self.clock.tick()
        self.reuse.request(1)
        node = self.nodes.get(number)
        if node is None:
            key = number.to_bytes(32, "big")
            node = self.nodes[number] = Node(SegmentSpan(key, None, 0, 1, NodeKind.REQUEST, key[:8]), self.clock.now)
            self.reuse.offered(1)
            self.reuse.made(node)
        else:
            node.score = self.clock.used(node.score)
            self.reuse.used(node)
        if number in self.copies:
            self.policy.used(self.copies[number])
            return True
        if len(self.copies) >= self.capacity:
            victim = self.policy.victim()
            if not self.policy.admits(node, victim):
                return False
            self.remove(int.from_bytes(victim.node.key, "big"), evicted=True)
        copy = self.copies[number] = bare_copy(node)
        self.policy.stored(copy)
        self.policy.expose(copy)
        return False

    def remove(self, number, evicted):
        copy = self.copies.pop(number)
        self.policy.shield(copy)
        self.policy.left(copy, evicted)
        self.log.append(number)


def bare_copy(node):
    copy = Copy.__new__(Copy)
    copy.node, copy.nbytes, copy.state = node, 1, CopyState.RESIDENT
    copy.children = copy.leases = 0
    copy.next, copy.position, copy.shelf = None, -1, None
    return copy


def evictions_of(name, keys, capacity):
    shelf = Shelf(name, capacity)
    for key in keys:
        shelf.access(key)
    return shelf.log


@pytest.mark.parametrize("name", NAMES)
def test_a_victim_is_exposed_and_every_exposed_copy_is_a_victim_in_the_end(name):
    rng, shelf = random.Random(1), Shelf(name, 30)
    exposed = set()
    for _ in range(2000):
        shelf.access(rng.randint(0, 80))
        exposed = {key for key in shelf.copies if key % 3}
        for key in [key for key in shelf.copies if not key % 3]:
            shelf.policy.shield(shelf.copies[key])
        victim = shelf.policy.victim()
        assert (victim is None) == (not exposed)
        assert victim is None or int.from_bytes(victim.node.key, "big") in exposed
        for key in [key for key in shelf.copies if not key % 3]:
            shelf.policy.expose(shelf.copies[key])
    seen = set()
    while (victim := shelf.policy.victim()) is not None:
        number = int.from_bytes(victim.node.key, "big")
        assert number in shelf.copies
        shelf.remove(number, evicted=True)
        seen.add(number)
    assert not shelf.copies
    assert len(seen) == 30


def test_lru_evicts_what_was_used_longest_ago():
    assert evictions_of("lru", [1, 2, 3, 1, 4, 5], capacity=3) == [2, 3]


def test_slru_evicts_what_was_used_once_before_what_was_used_twice():
    assert evictions_of("slru", [1, 2, 1, 3, 4, 5, 6], capacity=3) == [2, 3, 4]


def test_slru_takes_back_to_probation_what_protected_has_no_room_for():
    # Protected holds 4 of 5: with a fifth, the one used longest ago there is the first to go again.
    assert evictions_of("slru", [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6], capacity=5) == [1]


def test_decayed_lfu_evicts_what_was_used_least():
    assert evictions_of("decayed-lfu", [1, 1, 2, 3, 3, 4], capacity=3) == [2]


def test_arc_lets_what_comes_back_from_its_ghosts_be_frequent_and_gives_recency_more_room():
    shelf = Shelf("arc", 4)
    for key in (1, 2, 1, 2, 3, 4, 5):  # 1 and 2 are frequent; 3 goes, and is remembered
        shelf.access(key)
    assert shelf.log == [3]
    shelf.access(3)  # too early: the target of what was used once grows by one, and 3 is frequent now
    assert shelf.log == [3, 4]
    shelf.access(6)  # once-used 5 is within the target now, so what is frequent gives way
    assert shelf.log == [3, 4, 1]


def test_w_tinylfu_lets_a_newcomer_in_only_if_it_was_used_more_than_what_it_pushes_out():
    shelf = Shelf("w-tinylfu", 4)
    for key in (1, 1, 2, 2, 3, 3, 4, 5, 6, 7):
        shelf.access(key)
    assert shelf.log == [4, 5, 6]
    for _ in range(4):
        shelf.access(9)
    shelf.access(10)
    assert 9 in shelf.copies


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("lru",)])
def test_a_scan_does_not_push_out_what_is_used_again_and_again(name):
    world = World(served_name(name), 10)
    hot = [(1,), (2,), (3,)]
    world.hit_rate(hot * 30)
    world.hit_rate(one_shots(100))
    assert world.stored(1, 2, 3) == {1, 2, 3}


def test_the_default_beats_lru_on_conversations():
    requests = conversations(1, 150)
    assert World("lfu", 100).hit_rate(requests) > 1.1 * World("lru", 100).hit_rate(requests)


def test_the_default_learns_to_hold_a_part_of_a_loop_that_lru_never_hits():
    requests = loop(40, 30)
    assert World("lru", 30).hit_rate(requests) == 0.0
    assert World("lfu", 30).hit_rate(requests) > 0.3


def test_the_default_is_hardly_worse_than_decayed_lfu_where_only_popularity_counts():
    requests = zipf(1, 800, 60)
    rates = {name: World(name, 50).hit_rate(requests) for name in ("lfu", "decayed-lfu", "lru")}
    assert rates["lfu"] > rates["decayed-lfu"] - 0.03, rates
    assert rates["lfu"] > rates["lru"], rates


def test_a_user_finds_the_names_in_order_with_the_default_first():
    assert NAMES[0] == "lfu"
    assert policy_names() == ["lfu", "decayed-lfu", "lru"]
    assert {*policy_names(), "arc", "slru", "w-tinylfu"} == set(NAMES)
    setting = PolicySetting(HotnessClock(10), lambda: 1, 0, ReuseModel())
    for name in NAMES:
        assert isinstance(make_policy(served_name(name), setting), EvictionPolicy)


@pytest.mark.parametrize("name", ["arc", "slru", "w-tinylfu"])
def test_the_simulators_examples_are_no_names_of_the_servers(name):
    with pytest.raises(ValueError, match=f"unknown eviction policy '{name}': choose one of lfu, decayed-lfu, lru,"):
        find_policy(name)
