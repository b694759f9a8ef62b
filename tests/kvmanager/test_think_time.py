"""Think times: what is learned of when the next turn comes."""

import random

import pytest

from kvmanager.think_time import REFRESH_ANSWERS, ThinkTimes


def live(times, turn, think_s, watched_s=3600.0):
    """One conversation: silent until its next turn comes after `think_s`, or, with None, while it is watched."""
    times.answered()
    age = 0
    end = watched_s if think_s is None else think_s
    while age < times.ages and times.end_of(age) <= end:
        times.stayed_silent(turn, age)
        age += 1
    if think_s is not None:
        times.came_back(turn, think_s)


def taught(shares, seed=0, many=4000, **options):
    """`shares[turn]`: how likely a next turn comes after that turn; think times are log-normal around a minute."""
    times, rng = ThinkTimes(**options), random.Random(seed)
    for _ in range(many):
        for turn, share in shares.items():
            live(times, turn, rng.lognormvariate(4.1, 0.8) if rng.random() < share else None)
    return times


def test_the_share_of_conversations_that_come_back_is_learned_with_those_that_never_do():
    times = taught({1: 0.3})
    assert times.probability_of_next(1, 0.0) == pytest.approx(0.3, abs=0.03)


def test_the_next_turn_is_expected_around_the_usual_think_time():
    times = taught({1: 0.5})
    window = 20.0
    early, usual, late = (times.probability(1, silence, window) for silence in (0.0, 50.0, 1500.0))
    assert early < usual / 2
    assert late < usual / 10


def test_a_long_silence_makes_a_next_turn_unlikely():
    times = taught({1: 0.6})
    assert times.probability_of_next(1, 0.0) > 0.5
    assert times.probability_of_next(1, 1800.0) < 0.05


def test_conversations_of_many_turns_have_rates_of_their_own():
    times = taught({1: 0.2, 5: 0.9}, many=1500)
    assert times.probability_of_next(1, 0.0) == pytest.approx(0.2, abs=0.06)
    assert times.probability_of_next(5, 0.0) == pytest.approx(0.9, abs=0.06)


def test_a_turn_number_never_seen_is_judged_by_the_others():
    times = taught({1: 0.9}, many=500)
    assert times.probability_of_next(3, 0.0) == pytest.approx(times.probability_of_next(1, 0.0), abs=0.1)
    assert ThinkTimes().probability_of_next(3, 0.0) < 0.8


def test_what_was_seen_long_ago_gives_way_to_what_is_seen_now():
    times = taught({1: 0.95}, many=1000, half_life_turns=200.0)
    assert times.probability_of_next(1, 0.0) > 0.85
    rng = random.Random(1)
    for _ in range(2000):
        live(times, 1, rng.lognormvariate(4.1, 0.8) if rng.random() < 0.1 else None)
    assert times.probability_of_next(1, 0.0) < 0.25


def test_weights_do_not_overflow_and_what_they_weighed_shrinks_with_them():
    times = ThinkTimes(half_life_turns=50.0)
    for _ in range(3100):  # a weight of 2 ** 62
        live(times, 1, 10.0)
    assert times.probability_of_next(1, 0.0) > 0.8
    for _ in range(500):
        live(times, 1, None)
    assert times.probability_of_next(1, 0.0) < 0.4


@pytest.mark.parametrize("silence", [-5.0, 0.0, 0.1, 3.0, 59.9, 700.0, 3599.0, 3600.0, 1e9])
def test_a_probability_is_one_and_grows_with_the_window(silence):
    times = taught({1: 0.5}, many=100)
    found = [times.probability(1, silence, window) for window in (0.0, 0.3, 5.0, 80.0, 1e4)]
    assert found == sorted(found)
    assert found[0] == 0.0
    assert 0.0 <= found[-1] <= 1.0
    assert (found[-1] > 0.0) == (silence < 3600.0)


def test_windows_add_up():
    times = taught({1: 0.5}, many=100)
    first, second = times.probability(1, 10.0, 37.0), times.probability(1, 47.0, 100.0)
    assert 1 - (1 - first) * (1 - second) == pytest.approx(times.probability(1, 10.0, 137.0))


def test_half_of_the_turns_that_come_come_within_the_median():
    assert taught({1: 0.4}).median_s() == pytest.approx(60.3, rel=0.1)
    assert taught({1: 0.4, 2: 0.9}, seed=1).median_s() == pytest.approx(60.3, rel=0.1)
    assert 1 < ThinkTimes().median_s() < 60  # nothing learned: the middle of all scales


def test_a_turn_after_the_horizon_teaches_nothing():
    times = ThinkTimes(horizon_s=100.0)
    before = times.probability_of_next(1, 0.0)
    times.came_back(1, 100.0)
    times.came_back(1, 1e6)
    for _ in range(REFRESH_ANSWERS):
        times.answered()
    assert times.probability_of_next(1, 0.0) == before


def test_a_horizon_below_a_second_is_refused():
    with pytest.raises(ValueError, match="horizon"):
        ThinkTimes(horizon_s=0.5)
