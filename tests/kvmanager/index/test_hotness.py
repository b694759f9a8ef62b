from math import exp2

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.index.hotness import HotnessClock

histories = st.lists(st.booleans(), min_size=1, max_size=60)


def replay(history, half_life):
    """Return the clock and the score of a node used at the requests marked True, the first one included."""
    clock = HotnessClock(half_life)
    score, requests = clock.now, [0]
    for number, used in enumerate(history, 1):
        clock.tick()
        if used:
            score = clock.used(score)
            requests.append(number)
    return clock, score, requests


@given(histories, st.floats(0.5, 100))
def test_uses_is_the_sum_of_halving_counts(history, half_life):
    clock, score, requests = replay(history, half_life)
    assert clock.uses(score) == pytest.approx(sum(exp2((at - len(history)) / half_life) for at in requests))


@given(histories, histories, st.integers(1, 500))
def test_order_of_untouched_scores_never_changes(left, right, later):
    size = max(len(left), len(right))
    clock, left_score, _ = replay(left + [False] * (size - len(left)), 10)
    _, right_score, _ = replay(right + [False] * (size - len(right)), 10)
    before = clock.uses(left_score) - clock.uses(right_score)
    for _ in range(later):
        clock.tick()
    after = clock.uses(left_score) - clock.uses(right_score)
    assert before * after >= 0


def test_scores_stay_finite_after_a_billion_half_lives():
    clock = HotnessClock(1e-9)
    old = clock.now
    clock.tick()
    assert clock.uses(clock.used(old)) == 1.0
    assert clock.uses(old) == 0.0


def test_half_life_must_be_positive():
    with pytest.raises(ValueError, match="half_life_requests"):
        HotnessClock(0)
