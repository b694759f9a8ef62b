"""Clearing, uprooting and losing in slices: what others do between two slices, and how much work a slice is."""

import random

import pytest
from counted_calls import calls_of
from sliced_world import CPU, SlicedWorld, WideWorld

from kvmanager.config import ManagerConfig
from kvmanager.index import snapshots, sweeps
from kvmanager.index.deltas import HASHES_PER_EVENT, Position
from kvmanager.index.demotion_queue import CAPACITY
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.index.trie import PrefixTrie
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanReason
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.segments.spans import split_segments
from tests.sizes import LIVES, SLICED_SEGMENTS


@pytest.mark.parametrize("policy", ["coldest first", "lfu", "slru"])
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize(("make", "seeds"), [(SlicedWorld, LIVES // 2), (WideWorld, LIVES // 6)])
def test_between_two_slices_anything_may_happen(make, seeds, policy, most, monkeypatch):
    monkeypatch.setattr(sweeps, "MOST_PER_SLICE", most)
    monkeypatch.setattr(snapshots, "MOST_TOLD", most)
    for seed in range(seeds):
        world = make(policy, seed)
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


def test_of_nodes_that_come_and_go_none_is_remembered_that_is_gone(slow):
    """Nor does what is still said of one make it known again; of Redis it is told that it is away."""
    brain, manager = slow, slow.manager
    for number in range(20):
        node = Location(Tier.CPU, f"node-{number}")
        manager.set_budget(node, 10)
        brain.serve("abcdef", location=node)
        offer = brain.offer("uv", location=node)
        manager.forget_holder(node)
        assert brain.commit(offer.keys, node) == []
        assert brain.offer("uv", location=node).keys == ()
        manager.dropped(0.0, node, brain.keys("ab"))
        manager.adopt(0.0, node, brain.spans("ab"), [1])
    while manager.sweeping:
        manager.sweep(0.0)
    manager.set_budget(REDIS, 10)
    manager.forget_holder(REDIS)
    found = {(place["tier"], place["holder"]): place["budget_bytes"] for place in manager.stats(0.0)["locations"]}
    assert found == {("cpu", brain.cpu.holder): 100, ("redis", ""): 0}


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


def test_a_short_uprooting_between_the_slices_of_a_long_one_lets_it_find_all_that_hangs_on_its_root(slow):
    """Prompts bring siblings forward meanwhile; afterwards the system prompt is stored, planned and lost as ever."""
    chats = ["ab" + end + end for end in "cdefghijklmnopqrstuv"]
    for text in (*chats, "yz"):
        slow.serve(text)
    slow.manager.dropped(0.0, slow.cpu, slow.keys("ab"))
    slow.manager.dropped(0.0, slow.cpu, slow.keys("yz"))
    for chat in chats[:12]:
        slow.manager.release(slow.plan(chat).lease_id)
    while slow.manager.sweeping:
        slow.manager.sweep(0.0)
    assert slow.manager.stats(0.0)["locations"][0]["bytes"] == 0
    for chat in chats:
        slow.serve(chat)
    assert [slow.stored(chat) for chat in chats] == [4] * len(chats)


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
    assert not any(node.copies for node in manager._trie.nodes.values())
    return calls, [sum(len(order.keys) for order in directives) for directives in orders]


@pytest.mark.parametrize("begin", [clear, uproot, lose])
@pytest.mark.parametrize("chains", ["few", "one for each four segments"])
def test_a_slice_is_as_much_work_whatever_there_is_to_be_done(begin, chains, monkeypatch):
    """A root below which there are four chains, or hundreds; so many segments, or three times as many."""
    few_segments, many_segments = SLICED_SEGMENTS
    monkeypatch.setattr(sweeps, "MOST_PER_SLICE", min(sweeps.MOST_PER_SLICE, few_segments // 40))
    width = 4 if chains == "few" else few_segments // 4
    (few, ordered), (many, more_ordered) = (
        slices_of(begin, segments, width) for segments in (few_segments, many_segments)
    )
    assert max(many) <= 1.2 * max(few)
    assert len(many) >= 2.5 * len(few) >= 25
    assert max(ordered + more_ordered) <= sweeps.MOST_PER_SLICE


@pytest.mark.parametrize("roots", [3, 30])
def test_what_hangs_on_all_the_segments_that_are_lost_at_once_is_one_slice(roots):
    """Thirty system prompts below which 200 conversations each are stored: their bytes are lost in one report."""
    manager = KVManager(ManagerConfig(1), epoch=1)
    manager.set_budget(CPU, 10**9)
    rng = random.Random(0)
    lost = [rng.randbytes(32) for _ in range(roots)]
    for root in lost:
        for _ in range(200):
            spans = split_segments([root, rng.randbytes(32)], 0, 2, 1, 2)
            manager.adopt(0.0, CPU, spans, [1] * len(spans))
    orders = []
    calls = [calls_of(lambda: orders.append(manager.dropped(0.0, CPU, lost)))]
    while manager.sweeping:
        calls.append(calls_of(lambda: orders.append(manager.sweep(0.0))))
    ordered = [sum(len(order.keys) for order in directives) for directives in orders]
    assert max(ordered) <= sweeps.MOST_PER_SLICE
    assert sum(ordered) == 200 * roots
    assert calls[0] <= 1.3 * max(calls[1:])
    assert manager.stats(0.0)["locations"][0]["bytes"] == 0


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
