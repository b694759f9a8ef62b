from collections import Counter

import pytest

from kvmanager.index.deltas import Deltas, Part
from kvmanager.routing.cost import STARTING_CREDITS
from kvmanager.routing.mirror import PlacementMirror
from load_tests.simulator.cluster.routers import Prompt, make_router, router_names
from load_tests.simulator.cluster.text_prefix import TextPrefixTree
from load_tests.simulator.trace import BLOCK_TOKENS, block_key

NAMES = ["0", "1", "2", "3"]


class View:
    """A cluster that only has queue lengths and a mirror."""

    def __init__(self):
        self.names = NAMES
        self.mirror = PlacementMirror(1)
        self.queues = dict.fromkeys(NAMES, 0)

    def ongoing(self, replica):
        return self.queues[replica]

    def credits(self):
        return dict(STARTING_CREDITS)

    def hold(self, **blocks):
        events = [("dev+", name[1:], [block_key(n) for n in ids]) for name, ids in blocks.items()]
        assert self.mirror.apply(Deltas(1, 1, 0, [], Part(1, 0, True, events)))


@pytest.fixture
def view():
    return View()


def prompt(*ids, request="r"):
    return Prompt(request, [block_key(n) for n in ids], ids, len(ids) * BLOCK_TOKENS)


def test_an_unknown_router_is_refused_in_one_sentence(view):
    with pytest.raises(ValueError, match=r"^unknown router 'best'; choose one of random, .*ours$"):
        make_router("best", view, 0)


@pytest.mark.parametrize("name", router_names())
def test_every_router_names_a_replica_and_the_same_one_for_the_same_seed(view, name):
    def choices():
        router = make_router(name, view, seed=7)
        return [router.choose(prompt(n % 5, 5 + n, request=str(n)), float(n)) for n in range(40)]

    assert set(choices()) <= set(NAMES)
    assert choices() == choices()


def test_round_robin_goes_round(view):
    router = make_router("round-robin", view, 0)
    assert [router.choose(prompt(1), 0.0) for _ in range(5)] == ["0", "1", "2", "3", "0"]


def test_power_of_two_never_takes_the_longest_queue(view):
    view.queues["2"] = 5
    router = make_router("power-of-two", view, 0)
    assert {router.choose(prompt(1), 0.0) for _ in range(200)} == {"0", "1", "3"}


def test_a_session_stays_though_its_prompt_grows(view):
    router = make_router("session-hash", view, 0)
    homes = {n: router.choose(prompt(0, n), 0.0) for n in range(1, 50)}
    assert all(router.choose(prompt(0, n, 100 + n, 200 + n), 0.0) == home for n, home in homes.items())
    assert set(homes.values()) == set(NAMES)


def test_pure_affinity_goes_to_most_blocks_whatever_waits_there(view):
    view.hold(r1=[0, 1, 2], r3=[0, 1])
    view.queues["1"] = 1000
    router = make_router("pure-affinity", view, 0)
    assert {router.choose(prompt(0, 1, 2, 3), 0.0) for _ in range(20)} == {"1"}


def test_text_prefix_follows_what_was_sent_and_takes_the_shorter_queue(view):
    router = make_router("text-prefix", view, 0)
    home = router.choose(prompt(*range(10)), 0.0)
    assert {router.choose(prompt(*range(9), 50 + n), 0.0) for n in range(5)} == {home}
    assert router.choose(prompt(0, *range(100, 119)), 0.0) != home, "one block of twenty is no match"


def test_text_prefix_falls_back_to_two_choices_when_queues_are_far_apart(view):
    ids = tuple(range(10))
    following, falling = make_router("text-prefix", view, 0), make_router("text-prefix-10", view, 0)
    homes = [router.choose(prompt(*ids), 0.0) for router in (following, falling)]
    for queue in (10, 11):
        view.queues = dict.fromkeys(NAMES, 0) | dict.fromkeys(homes, queue)
        found = {router.choose(prompt(*ids), 0.0) for router in (falling,) for _ in range(20)}
        assert (found == {homes[1]}) == (queue == 10)
    assert following.choose(prompt(*ids), 0.0) == homes[0]


def test_the_tree_names_the_replicas_of_the_longest_match_and_those_with_least():
    tree = TextPrefixTree(["a", "b", "c"])
    tree.insert((1, 2, 3), "a")
    tree.insert((1, 2), "b")
    assert tree.match((1, 2, 9)) == (2, ["a", "b"])
    assert tree.match((1, 2, 3, 4)) == (3, ["a"])
    assert tree.match((9,)) == (0, ["a", "b", "c"])
    assert tree.smallest() == ["c"]
    tree.insert((1, 2), "b")
    tree.insert((7, 8, 9), "c")
    assert tree.smallest() == ["b"]


def test_ours_goes_where_the_prefix_is_unless_it_waits_too_long(view):
    view.hold(r1=range(4))
    router = make_router("ours", view, 0)
    assert router.choose(prompt(0, 1, 2, 3, 4, request="a"), 0.0) == "1"
    found = Counter(router.choose(prompt(0, 1, 2, 3, 10 + n, request=str(n)), 0.0) for n in range(100))
    assert found["1"] == max(found.values())
    assert set(found) == set(NAMES)


def test_ours_orders_a_hot_prefix_moved(view):
    view.hold(r1=range(8))
    router = make_router("ours", view, 0)
    for n in range(40):
        router.choose(prompt(*range(8), 10 + n, 100 + n, request=str(n)), 0.0)
    moves = router.take_moves()
    assert moves
    assert all(move.hashes == tuple(map(block_key, range(8))) and move.source != move.target for move in moves)
    assert router.take_moves() == []
