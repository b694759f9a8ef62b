import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.circuit_breaker import CircuitBreaker, CircuitState
from tests.quantities import up_to


def opened(**limits):
    breaker = CircuitBreaker(**limits)
    while breaker.state is not CircuitState.OPEN:
        breaker.failed(0.0)
    return breaker


def test_it_opens_after_failures_in_a_row():
    breaker = CircuitBreaker(failures_to_open=3)
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    assert breaker.opened == 0
    breaker.failed(0.0)
    assert not breaker.allows(0.0)
    assert (breaker.state, breaker.opened) == (CircuitState.OPEN, 1)


def test_exactly_one_call_probes_when_the_time_is_over():
    breaker = opened(open_s=1.0)
    assert not breaker.allows(0.99)
    assert breaker.allows(1.0)
    assert breaker.state is CircuitState.HALF_OPEN
    assert not breaker.allows(1.0)
    assert not breaker.allows(20.0)


def test_a_successful_probe_closes_it_and_forgets_the_failures():
    breaker = opened(failures_to_open=2)
    assert breaker.allows(1.0)
    breaker.succeeded()
    assert breaker.state is CircuitState.CLOSED
    breaker.failed(1.0)
    assert breaker.allows(1.0)


def test_a_probe_that_is_given_up_lets_the_next_caller_probe():
    breaker = opened(open_s=1.0, longest_open_s=30.0)
    assert breaker.allows(1.0)
    breaker.abandoned()
    assert breaker.state is CircuitState.OPEN
    assert breaker.allows(1.0)
    assert not breaker.allows(1.0)
    breaker.failed(1.0)
    assert not breaker.allows(2.9)
    assert breaker.allows(3.0)
    assert breaker.opened == 2


def test_giving_up_a_call_says_nothing_about_the_peer():
    breaker = CircuitBreaker(failures_to_open=2)
    breaker.failed(0.0)
    breaker.abandoned()
    breaker.failed(0.0)
    breaker.abandoned()
    assert breaker.state is CircuitState.OPEN
    assert not breaker.allows(0.5)


def test_it_waits_twice_as_long_after_each_failed_probe_up_to_the_limit():
    breaker = opened(open_s=1.0, longest_open_s=5.0)
    now, waits = 0.0, []
    for _ in range(5):
        started = now
        while not breaker.allows(now):
            now += 0.5
        waits.append(now - started)
        breaker.failed(now)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert breaker.opened == 6


def test_it_waits_briefly_again_once_a_probe_has_succeeded():
    breaker = opened(failures_to_open=1, open_s=1.0)
    assert breaker.allows(1.0)
    breaker.failed(1.0)
    assert breaker.allows(3.0)
    breaker.succeeded()
    breaker.failed(3.0)
    assert breaker.allows(4.0)


def test_answers_to_calls_from_before_it_opened_change_nothing():
    breaker = opened(open_s=1.0)
    breaker.failed(0.9)
    breaker.succeeded()
    assert breaker.state is CircuitState.OPEN
    assert breaker.opened == 1
    assert breaker.allows(1.0)


def test_a_probe_that_never_reports_does_not_block_for_ever():
    breaker = opened(open_s=1.0, longest_open_s=30.0)
    assert breaker.allows(1.0)
    assert not breaker.allows(30.9)
    assert breaker.allows(31.0)
    assert not breaker.allows(31.0)


def test_states_are_named_as_in_the_stats():
    assert [*CircuitState] == ["closed", "half_open", "open"]


@pytest.mark.parametrize(
    "limits", [{"failures_to_open": 0}, {"open_s": 0.0}, {"open_s": 2.0, "longest_open_s": 1.0}, {"open_s": -1.0}]
)
def test_limits_that_cannot_work_are_refused(limits):
    with pytest.raises(ValueError, match="must"):
        CircuitBreaker(**limits)


@given(st.lists(st.tuples(st.sampled_from(["ask", "succeed", "fail"]), up_to(40.0)), max_size=60))
def test_it_always_lets_a_call_through_again_in_the_end(steps):
    breaker, now = CircuitBreaker(), 0.0
    for step, wait in steps:
        now += wait
        if step == "ask":
            allowed = breaker.allows(now)
            assert allowed or breaker.state is not CircuitState.CLOSED
        elif step == "succeed":
            breaker.succeeded()
        else:
            breaker.failed(now)
    assert breaker.allows(now + 30.0)
