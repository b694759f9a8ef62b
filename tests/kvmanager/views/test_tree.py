"""The tree that people see: what is kept of it, what is counted of the rest, and that its work is bounded."""

import random
from itertools import islice

import pytest

from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import DeltaLog
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Location, Tier
from kvmanager.index.trie import PrefixTrie
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import block_hashes
from kvmanager.segments.spans import MARK_BYTES, NodeKind, SegmentSpan, split_segments
from kvmanager.views import tree as tree_module
from kvmanager.views.tree import Views
from tests.sizes import SHOWN_NODES


class Forest:
    """A trie of segments of one block of 32 tokens, made by hand."""

    def __init__(self):
        self.trie = PrefixTrie(10**9)
        self.devices = DeviceIndex(DeltaLog(10))
        self.views = Views(self.trie, self.devices, HotnessClock(1000.0), 32)
        self._rng = random.Random(0)

    def add(self, parent=None, score=0.0, tenant="", kind=NodeKind.REQUEST):
        key = self._rng.randbytes(32)
        start = 0 if parent is None else parent.end_block
        above = None if parent is None else parent.key
        return self.trie.insert(SegmentSpan(key, above, start, 1, kind, key[:MARK_BYTES], tenant), score)

    def chain(self, length, score=0.0, parent=None, tenant=""):
        nodes = []
        for _ in range(length):
            parent = self.add(parent, score, tenant)
            nodes.append(parent)
        return nodes

    def keys(self, *asked):
        return [one.node.key for one in self.views.tree(*asked).shown]


@pytest.fixture
def forest():
    return Forest()


def test_the_hottest_subtrees_are_kept_and_the_rest_is_counted(forest):
    hot = forest.chain(3, score=9.0)
    cold = [forest.add(score=float(number)) for number in range(5)]
    for number in range(4):
        forest.add(hot[0], score=-float(number))
    tree = forest.views.tree(None, None, 3, 4)
    assert [one.node for one in tree.shown] == [*hot, cold[-1]]
    assert tree.hidden_roots == 4
    first, second, third, alone = tree.shown
    assert (first.hidden, first.segments_below, first.blocks_below) == (4, 6, 6)
    assert (second.hidden, second.segments_below, third.segments_below, alone.segments_below) == (0, 1, 0, 0)
    assert all(one.complete for one in tree.shown)


def test_depth_ends_the_picture_and_a_node_of_it_begins_the_next(forest):
    nodes = forest.chain(6)
    assert forest.keys(None, None, 2, 100) == [node.key for node in nodes[:2]]
    shown = forest.views.tree(None, nodes[1].key, 3, 100)
    assert [one.node for one in shown.shown] == nodes[1:5]
    assert shown.hidden_roots == 0
    assert (shown.shown[-1].hidden, shown.shown[-1].segments_below) == (1, 1)
    assert shown.shown[0].segments_below == 4


def test_a_tenant_sees_its_own_nodes_only(forest):
    own, other = forest.chain(2, tenant="mine"), forest.chain(2, tenant="theirs")
    assert forest.keys("mine", None, 3, 100) == [node.key for node in own]
    assert forest.views.tree("mine", other[0].key, 3, 100) is None
    assert forest.views.tree("mine", bytes(32), 3, 100) is None
    assert forest.views.tree("nobody", None, 3, 100).shown == []
    assert set(forest.keys(None, None, 3, 100)) == {node.key for node in own + other}


def test_of_many_tenants_each_has_roots_among_those_that_are_looked_at(forest, monkeypatch):
    monkeypatch.setattr(tree_module, "MOST_SIBLINGS", 8)
    for tenant in "abcd":
        for _ in range(10):
            forest.add(tenant=tenant)
    tree = forest.views.tree(None, None, 1, 100)
    assert sorted(one.node.tenant for one in tree.shown) == ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert tree.hidden_roots == 32


def test_a_node_says_what_it_is(forest):
    root = forest.add(score=1.0, tenant="t")
    leaf = forest.add(root, score=0.0, kind=NodeKind.ANSWER)
    tree = forest.views.tree(None, None, 3, 100)
    forest.devices.stored("a", [root.key])
    first, second = forest.views.describe(tree.shown, {1: "b", 0: "a"}, with_tenants=True)
    assert first == {
        "id": root.key.hex(),
        "parent": None,
        "kind": "request",
        "start_token": 0,
        "tokens": 32,
        "segments_below": 1,
        "tokens_below": 32,
        "below_complete": True,
        "uses": 2.0,
        "hotness": 0.6667,
        "bytes": 0,
        "tiers": {"device": [0], "cpu": 0, "redis": 0},
        "pinned": False,
        "children": 1,
        "hidden": 0,
        "tenant": "t",
    }
    assert (second["parent"], second["kind"], second["tiers"]["device"]) == (root.key.hex(), "answer", [])
    assert "tenant" not in forest.views.describe(tree.shown, {}, with_tenants=False)[0]
    assert leaf.tenant == "t"


def test_bytes_are_those_that_plans_may_read_and_a_pin_is_seen(brain_with):
    brain = brain_with(pin_budget_bytes=10)
    brain.serve("abcd")
    brain.manager.pin(0.0, brain.manager.known_ends(brain.hashes("abcd")), 10.0)
    views = brain.manager.views
    nodes = views.describe(views.tree(None, None, 3, 10).shown, {}, with_tenants=False)
    assert [(node["bytes"], node["tiers"]["cpu"], node["pinned"]) for node in nodes] == [(1, 1, True), (1, 1, True)]


def test_those_used_last_are_looked_at_where_there_are_too_many_siblings(monkeypatch):
    monkeypatch.setattr(tree_module, "MOST_SIBLINGS", 2)
    manager = KVManager(ManagerConfig(1, block_tokens=1), epoch=1)
    prompts = [block_hashes([number], 1, "tests") for number in range(9)]
    cpu = Location(Tier.CPU, "node")
    manager.set_budget(cpu, 100)
    for hashes in prompts:
        offer = manager.offer(0.0, "replica", cpu, split_segments(hashes, 0, 1, 1, 1), [1])
        manager.commit(0.0, cpu, offer.keys, [1])
    for number in (3, 0):
        manager.plan(0.0, "replica", "node", PlanQuery(prompts[number]))
    assert [one.node.key for one in manager.views.tree(None, None, 1, 10).shown] == [prompts[0][0], prompts[3][0]]


@pytest.mark.parametrize("shape", ["roots", "children", "chain", "bushy"])
def test_a_call_touches_a_bounded_number_of_many_nodes(forest, shape):
    if shape == "roots":
        for number in range(SHOWN_NODES):
            forest.add(score=float(number))
    elif shape == "children":
        root = forest.add()
        for number in range(SHOWN_NODES):
            forest.add(root, score=-float(number))
    elif shape == "chain":
        forest.chain(SHOWN_NODES)
    else:
        level = [forest.add()]
        while len(forest.trie.nodes) < SHOWN_NODES:
            parents = islice((node for node in level for _ in range(10)), SHOWN_NODES - len(forest.trie.nodes))
            level = [forest.add(node) for node in parents]
    for depth, most in ((1, 1), (3, 300), (16, 2000), (10**6, 10**6)):
        tree = forest.views.tree(None, None, depth, most)
        assert len(tree.shown) <= min(most, tree_module.MOST_NODES)
        bound = tree_module.MOST_LOOKED_AT + tree_module.MOST_COUNTED + tree_module.LEAST_COUNTED * len(tree.shown)
        assert tree.looked_at <= bound
        hidden = tree.hidden_roots + sum(one.hidden for one in tree.shown)
        assert hidden or len(tree.shown) == len(forest.trie.nodes), "what is left out is told"
        assert not all(one.complete for one in tree.shown) or shape == "roots"
