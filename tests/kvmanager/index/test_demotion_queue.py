import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvmanager.config import ManagerConfig
from kvmanager.index import demotion_queue
from kvmanager.index.counters import Counters
from kvmanager.index.demotion_queue import DemotionQueue
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Location, Tier


def test_every_segment_is_copied_once_it_is_stored(tiered):
    tiered.serve("abcd")
    demotion = tiered.next_demotion()
    assert (demotion.source, demotion.keys, demotion.nbytes) == (tiered.cpu, tiered.keys("abcd"), (1, 1))
    assert demotion.evict == ()
    assert tiered.kept("abcd") == 0
    assert tiered.finish(demotion) == ()
    assert tiered.kept("abcd") == 4
    assert tiered.next_demotion() is None
    assert tiered.counters()["demoted_segments"] == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture is a function without state
@given(texts=st.lists(st.text("ab", min_size=1, max_size=9), max_size=12), most_bytes=st.integers(1, 9))
def test_all_that_a_cpu_tier_holds_comes_to_redis_in_no_more_pieces_than_needed(brain_with, texts, most_bytes):
    brain = brain_with(budget=8, redis=1000, cpu_high_water=1.0)
    for text in texts:
        brain.serve(text)
    pieces = []
    for _ in range(9):
        pieces.append(brain.next_demotion(most_bytes))
        if pieces[-1] is None:
            break
    sizes = [len(piece.keys) for piece in pieces[:-1]]
    assert pieces[-1] is None
    assert all(size == most_bytes for size in sizes[:-1])
    for piece in pieces[:-1]:
        assert brain.finish(piece) == ()
    for text in texts:
        assert brain.kept(text) == brain.stored(text)


def test_nothing_is_copied_before_it_is_stored(tiered):
    tiered.offer("abcd")
    assert tiered.next_demotion() is None


def test_a_segment_used_long_before_it_was_stored_is_copied_too(brain_with):
    brain = brain_with(redis=20, half_life_requests=2)
    offer = brain.offer("abcd")
    for letter in range(50):
        brain.plan(chr(1000 + letter) * 2)
    brain.commit(offer.keys)
    assert brain.next_demotion().keys == offer.keys


def test_only_what_was_used_often_enough_is_copied(brain_with):
    brain = brain_with(redis=20, redis_min_uses=3)
    for _ in range(2):
        brain.serve("ab")
        brain.serve("uv")
        assert brain.next_demotion() is None
    brain.serve("ab")
    assert brain.demote_all() == list(brain.keys("ab"))


def test_a_use_of_a_few_requests_ago_counts_whole_and_an_old_one_does_not(brain_with):
    for others, copied in ((50, True), (2000, False)):
        brain = brain_with(redis=20, redis_min_uses=2)
        brain.serve("ab")
        for _ in range(others):
            brain.plan("uv")
        brain.serve("ab")
        assert (brain.next_demotion() is not None) == copied


def test_what_lies_before_a_segment_goes_with_it(brain_with):
    brain = brain_with(redis=20, redis_min_uses=2)
    brain.serve("abcdef")
    brain.serve("abcdef")
    brain.manager.clear({Tier.REDIS})
    assert brain.next_demotion().keys == brain.keys("abcdef")


def test_what_redis_has_of_a_chain_is_not_copied_again(tiered):
    tiered.serve("abcd")
    tiered.demote_all()
    tiered.serve("abcdef")
    assert tiered.demote_all() == list(tiered.keys("abcdef")[2:])


def test_a_chain_too_long_for_one_demotion_goes_piece_by_piece_from_its_head(tiered):
    tiered.serve("abcdef")
    pieces = [tiered.next_demotion(most_bytes=2) for _ in range(2)]
    assert tiered.next_demotion(most_bytes=2) is None
    assert [len(piece.keys) for piece in pieces] == [2, 1]
    assert pieces[0].keys + pieces[1].keys == tiered.keys("abcdef")
    tiered.finish(pieces[1])
    assert tiered.kept("abcdef") == 0  # published from the head on
    tiered.finish(pieces[0])
    assert tiered.kept("abcdef") == 6


def test_a_used_chain_too_long_for_one_demotion_goes_piece_by_piece_too(brain_with):
    brain = brain_with(redis=20, redis_min_uses=2)
    brain.serve("abcdef")
    brain.serve("abcdef")
    assert [len(brain.next_demotion(most_bytes=1).keys) for _ in range(3)] == [1, 1, 1]
    assert brain.next_demotion(most_bytes=1) is None


def test_one_segment_goes_even_if_it_is_larger_than_the_limit(tiered):
    tiered.commit(tiered.offer("abcd").keys)
    assert tiered.next_demotion(most_bytes=0).keys == tiered.keys("ab")


def test_no_segment_is_in_two_demotions(tiered):
    tiered.serve("abcd")
    first = tiered.next_demotion()
    tiered.plan("abcd")
    assert tiered.next_demotion() is None
    tiered.finish(first)
    assert tiered.next_demotion() is None


def test_one_demotion_comes_from_one_node(tiered):
    other = Location(Tier.CPU, "other")
    tiered.manager.set_budget(other, 10)
    tiered.serve("ab")
    tiered.serve("uv", location=other)
    first, second = tiered.next_demotion(), tiered.next_demotion()
    assert (first.source, first.keys) == (tiered.cpu, tiered.keys("ab"))
    assert (second.source, second.keys) == (other, tiered.keys("uv"))


def test_what_waited_and_is_gone_meanwhile_is_skipped(tiered):
    tiered.serve("abcd")
    tiered.serve("uv")
    tiered.manager.dropped(0, tiered.cpu, tiered.keys("abcd"))
    assert tiered.demote_all() == list(tiered.keys("uv"))


def test_the_queue_is_bounded_and_drops_the_oldest(brain_with, monkeypatch):
    monkeypatch.setattr(DemotionQueue.__init__, "__defaults__", (2,))
    brain = brain_with(redis=20)
    for text in ("ab", "uv", "xy"):
        brain.serve(text)
    assert brain.manager.stats(0)["demotion_queue"] == 2
    assert brain.counters()["dropped_demotions"] == 1
    assert brain.demote_all() == [*brain.keys("uv"), *brain.keys("xy")]
    brain.serve("ab")
    assert brain.demote_all() == list(brain.keys("ab"))


def test_one_call_looks_at_a_bounded_part_of_the_queue(brain_with, monkeypatch):
    monkeypatch.setattr("kvmanager.moves.demotions.MOST_CONSIDERED", 3)
    brain = brain_with(redis=20)
    for letter in range(5):
        brain.serve(chr(1000 + letter) * 2)
    brain.manager.clear({Tier.CPU})
    assert brain.next_demotion() is None
    assert brain.manager.stats(0)["demotion_queue"] == 2


# Without Redis


def test_without_redis_nothing_waits_and_nothing_is_copied(brain_with):
    for budget in (None, 0):
        brain = brain_with(budget=2, redis=budget)
        brain.serve("abcd")
        assert brain.next_demotion() is None
        assert brain.manager.relieve(0) == ()
        assert brain.manager.stats(0)["demotion_queue"] == 0


def test_what_was_stored_before_redis_came_is_copied_then(brain):
    brain.serve("abcd")
    brain.manager.set_budget(brain.redis, 10)
    assert sorted(brain.demote_all()) == sorted(brain.keys("abcd"))


def test_a_redis_that_comes_back_empty_is_filled_again(tiered):
    tiered.serve("abcd")
    tiered.demote_all()
    tiered.serve("uv")
    tiered.manager.forget_holder(tiered.redis)
    assert tiered.manager.stats(0)["demotion_queue"] == 0
    assert tiered.next_demotion() is None
    tiered.manager.set_budget(tiered.redis, 20)
    tiered.demote_all()
    assert tiered.kept("abcd") == 4


def test_what_redis_reports_when_it_comes_back_is_not_copied_again(tiered):
    tiered.serve("abcd")
    tiered.demote_all()
    tiered.manager.forget_holder(tiered.redis)
    tiered.manager.set_budget(tiered.redis, 20)
    for span in tiered.spans("abcd"):  # in chunks of one
        assert tiered.manager.adopt(0, tiered.redis, [span], [1]) == [span.key]
    assert tiered.next_demotion() is None


def test_only_the_hottest_wait_when_redis_comes_to_a_full_tier():
    clock, counters = HotnessClock(10), Counters()
    queue = DemotionQueue(clock, counters, 1.0, capacity=2)
    nodes = [_stored(key, score) for key, score in ((b"a", 1.0), (b"b", 3.0), (b"c", 2.0))]
    survey = queue.open(nodes)
    while not survey.done:
        survey.step(1)
    assert (len(queue), queue.first()) == (2, b"b")
    queue.open(nodes)
    assert counters.dropped_demotions == 0


class _stored:  # noqa: N801
    """A node with one copy in a CPU tier, as the queue sees it."""

    def __init__(self, key, score):
        self.key, self.score = key, score
        self.copies, self.store, self.location, self.tier, self.resident = self, self, self, Tier.CPU, True

    def all_copies(self):
        yield self


@pytest.mark.parametrize(
    "settings",
    [{"cpu_high_water": 0.0}, {"cpu_high_water": 1.1}, {"redis_min_uses": 0.5}, {"redis_min_uses": float("nan")}],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        ManagerConfig(2, **settings)


def test_the_queue_holds_ten_thousand():
    assert demotion_queue.CAPACITY == 10_000
