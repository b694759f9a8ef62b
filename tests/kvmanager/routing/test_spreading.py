import pytest

from kvmanager.routing import spreading as module
from kvmanager.routing.mirror import TierHits
from kvmanager.routing.spreading import Spread, Spreading

SHARED = [bytes([0, number]) for number in range(8)]
NOTHING = TierHits(0, 0, 0)


def prompt(user):
    """8 blocks that all prompts begin with, and 4 of one user's own."""
    return [*SHARED, *(bytes([user, number]) for number in range(4))]


def press(spreading, user, now, chosen="a", waits=None, hits=None):
    waits = waits or {"a": 9000.0, "b": 2000.0, "c": 1000.0}
    hits = hits or {"a": TierHits(8, 0, 0), "b": NOTHING, "c": NOTHING}
    return spreading.consider(now, prompt(user), chosen, waits, hits)


@pytest.fixture
def spreading():
    return Spreading(blocks_per_segment=2, half_life_s=10.0)


def test_a_prefix_that_presses_three_times_moves_to_the_replica_that_would_serve_it_soonest(spreading):
    assert [press(spreading, user, 0.0) for user in (1, 2)] == [[], []]
    assert press(spreading, 3, 0.0) == [Spread(tuple(SHARED), "a", "c")]


def test_only_what_the_pressing_prompts_share_moves(spreading):
    hits = {"a": TierHits(12, 0, 0), "b": NOTHING, "c": NOTHING}  # of each user's own conversation too
    moves = [press(spreading, user, 0.0, hits=hits) for user in (1, 2, 3)]
    assert moves[-1] == [Spread(tuple(SHARED), "a", "c")]


def test_where_the_prompt_itself_goes_needs_no_move(spreading):
    moves = [press(spreading, user, 0.0, chosen="c") for user in (1, 2, 3)]
    assert moves[-1] == [Spread(tuple(SHARED), "a", "b")]


def test_the_next_home_takes_new_evidence(spreading):
    hits = {"a": TierHits(8, 0, 0), "b": NOTHING, "c": TierHits(8, 0, 0)}
    waits = {"a": 9000.0, "b": 1000.0, "c": 8000.0}
    assert press(spreading, 1, 0.0) + press(spreading, 2, 0.0) == []
    assert press(spreading, 3, 0.0) != []
    moves = [press(spreading, user, 0.0, waits=waits, hits=hits) for user in (4, 5, 6)]
    assert moves == [[], [], [Spread(tuple(SHARED), "c", "b")]]


def test_a_prefix_that_presses_now_and_then_stays(spreading):
    assert all(press(spreading, user, 20.0 * user) == [] for user in range(50))


def test_an_idle_holder_presses_nobody(spreading):
    waits = {"a": 500.0, "b": 2000.0, "c": 1000.0}
    assert all(press(spreading, user, 0.0, waits=waits) == [] for user in range(50))
    assert press(spreading, 1, 0.0) == [], "nothing has pressed before"


def test_what_the_soonest_replica_holds_too_is_not_moved(spreading):
    hits = dict.fromkeys("abc", TierHits(8, 0, 0))
    assert all(press(spreading, user, 0.0, hits=hits) == [] for user in range(50))


def test_what_can_be_loaded_from_a_shared_tier_needs_no_order(spreading):
    hits = {"a": TierHits(8, 0, 0), "b": TierHits(0, 6, 2), "c": TierHits(0, 8, 0)}
    assert all(press(spreading, user, 0.0, hits=hits) == [] for user in range(50))


def test_a_prompt_that_would_be_loaded_where_it_is_served_soonest_does_not_press(spreading):
    hits = {"a": TierHits(8, 0, 0), "b": NOTHING, "c": TierHits(0, 8, 0)}
    assert all(press(spreading, user, 0.0, chosen="c", hits=hits) == [] for user in range(50))


def test_a_replica_that_lacks_less_than_a_segment_is_no_target(spreading):
    hits = {"a": TierHits(8, 0, 0), "b": TierHits(7, 0, 0), "c": NOTHING}
    assert all(press(spreading, user, 0.0, chosen="c", hits=hits) == [] for user in range(50))


def test_one_replica_has_nowhere_to_move(spreading):
    assert all(press(spreading, n, 0.0, waits={"a": 9000.0}, hits={"a": TierHits(8, 0, 0)}) == [] for n in range(9))


def test_the_table_of_cuts_is_bounded(spreading, monkeypatch):
    monkeypatch.setattr(module, "MOST_CUTS", 10)
    for user in range(1, 100):
        hashes = [bytes([user, number]) for number in range(8)]
        hits = {"a": TierHits(8, 0, 0), "b": NOTHING, "c": NOTHING}
        spreading.consider(0.0, hashes, "a", {"a": 9000.0, "b": 2000.0, "c": 1000.0}, hits)
    assert len(spreading._pressing) == 10


def test_what_has_not_pressed_for_long_is_forgotten(spreading):
    """The conversations of an hour, which all share a prefix: one is new every second."""
    hits = {"a": TierHits(12, 0, 0), "b": NOTHING, "c": NOTHING}
    waits = {"a": 9000.0, "c": 1000.0}
    for second in range(3600):
        own = [second.to_bytes(2) + bytes([number]) for number in range(4)]
        spreading.consider(float(second), [*SHARED, *own], "c", waits, hits)
    assert len(spreading._pressing) == 4 + 2 * (20 * 10 + 1)
