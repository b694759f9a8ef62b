"""Policies keep their bounds whatever comes: nobody starves, nobody ping-pongs; and the short ones go first."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slots import STEP_S, Arrival, Slots, run

from kvmanager.scheduling.jobs import MOST_PRIORITY, PRIOR_TOKENS, new_job
from kvmanager.scheduling.policies import (
    LEAST_UNITS,
    LEVELS,
    MOST_PREEMPTIONS,
    OVERTAKING,
    QUANTUM_UNITS,
    STARVE_S,
    MultiLevel,
    Shortest,
    make_policy,
    may_be_preempted,
    victim_for,
)
from kvmanager.scheduling.step_time import FIRST_DECODE_S, StepTime

POLICIES = ("shortest", "mlfq")

arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 200),
        prompt=st.integers(1, 800),
        answer=st.integers(1, 300),
        predicted=st.none() | st.floats(0.5, 3000.0),
        priority=st.integers(-20, 20),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60)
@given(st.sampled_from(POLICIES), arrivals, st.integers(1, 5))
def test_every_job_ends_and_the_bounds_on_thrash_hold(name: str, jobs: list[Arrival], slots: int) -> None:
    engine = run(name, jobs, slots)

    steps = [step for step, _ in engine.preempted]
    assert len(steps) == len(set(steps)), "one preemption a step"
    assert all(served >= LEAST_UNITS for served in engine.served_at_preemption)


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_job_ends_though_short_ones_come_for_ever(name: str) -> None:
    """A slot that new short jobs would fill alone: each takes ten steps, and one comes every ten."""
    engine = Slots(make_policy(name, StepTime()), 1)  # type: ignore[arg-type]
    engine.enter(0, Arrival(0, 100, 200, 200.0))
    for step in range(60_000):
        if step % 10 == 0:
            engine.enter(1 + step, Arrival(step, 1, 10, 10.0))
        engine.run_step()
        if 0 in engine.ended:
            break
    assert 0 in engine.ended
    waited_at_most = (MOST_PREEMPTIONS + 1) * STARVE_S if name == "mlfq" else 2 * OVERTAKING * 210 * FIRST_DECODE_S
    assert engine.ended[0] * STEP_S < waited_at_most + 1000 * STEP_S


@settings(max_examples=60)
@given(arrivals)
def test_shortest_is_overtaken_only_by_jobs_that_come_within_its_patience(jobs: list[Arrival]) -> None:
    time = StepTime()
    policy = Shortest(time)
    entered = []
    for arrival in jobs:
        job = new_job(arrival.at_step * STEP_S, arrival.prompt, arrival.answer, arrival.predicted)
        policy.enter(job)
        entered.append(job)
    for job in entered:
        own_s = time.units(job.prefill_tokens, job.predicted_tokens) * time.decode_s
        for other in entered:
            if other.key < job.key:
                assert other.entered < job.entered + OVERTAKING * own_s


@pytest.mark.parametrize("name", POLICIES)
def test_equal_jobs_never_change_places(name: str) -> None:
    engine = run(name, [Arrival(0, 20, 60, 60.0) for _ in range(12)], slots=2)
    if name == "shortest":
        assert engine.preempted == []
    policy = make_policy(name, StepTime())  # type: ignore[arg-type]
    one, other = (new_job(0.0, 20, 60, 60.0) for _ in range(2))
    for job in (one, other):
        policy.enter(job)
        job.since_admission = 100.0
    assert victim_for(policy, one, [("other", other)]) is None


@pytest.mark.parametrize("name", POLICIES)
def test_short_jobs_pass_a_long_one_and_it_is_no_later_than_what_they_took(name: str) -> None:
    long, shorts = Arrival(0, 400, 400, 400.0), [Arrival(20, 5, 8, 8.0) for _ in range(6)]
    first_come, passed = run("fcfs", [long, *shorts], slots=1), run(name, [long, *shorts], slots=1)
    short_end = {one: engine.ended[6] for one, engine in (("fcfs", first_come), ("policy", passed))}
    assert short_end["policy"] < short_end["fcfs"] / 3
    assert passed.ended[0] <= first_come.ended[0] + 6 * 10


def test_shortest_preempts_for_half_of_the_rest_only() -> None:
    policy = Shortest(StepTime())
    victim, half, more = (new_job(0.0, 0, n, float(n)) for n in (100, 50, 51))
    for job in (victim, half, more):
        policy.enter(job)
    victim.since_admission = 10.0
    assert victim_for(policy, half, [("victim", victim)]) == "victim"
    assert victim_for(policy, more, [("victim", victim)]) is None


def test_who_outlives_its_prediction_is_not_taken_for_nearly_done() -> None:
    job = new_job(0.0, 0, 1000, 10.0)
    job.answered = 200
    assert job.answer_left == 200
    job.answered = 990
    assert job.answer_left == 10


def test_a_job_joins_the_first_level_that_holds_its_first_iteration_and_falls_by_one_for_each_quantum() -> None:
    policy = MultiLevel(StepTime())
    short, long, endless = new_job(0.0, 10, 10), new_job(0.0, 2000, 10), new_job(0.0, 1_000_000, 10)
    for job in (short, long, endless):
        policy.enter(job)
    assert (short.level, long.level, endless.level) == (0, 1, LEVELS - 1), (
        "some 200 units are more than 64 and less than 256"
    )
    changed = [policy.served(short, 1.0) for _ in range(330)]
    assert (sum(changed), short.level, short.key) == (2, 2, 2.0), "after 64 units and 256 more"
    assert not any(policy.served(endless, 1e6) for _ in range(3))


def test_who_waits_too_long_goes_to_the_front_whatever_comes_with_a_priority() -> None:
    policy = MultiLevel(StepTime())
    old, favoured = new_job(0.0, 5000, 10), new_job(STARVE_S, 1, 10, priority=-1000)
    policy.enter(old)
    policy.enter(favoured)
    assert not policy.age(old, STARVE_S - 0.1)
    assert policy.age(old, STARVE_S)
    assert old.key <= favoured.key
    assert not policy.age(old, 10 * STARVE_S), "it is there already"


def test_who_was_at_the_front_is_at_its_level_as_any_other_when_it_has_had_its_quantum() -> None:
    policy = MultiLevel(StepTime())
    starved, short = new_job(0.0, 10, 100_000), new_job(100.0, 10, 20)
    policy.enter(starved)
    policy.enter(short)
    for _ in range(100):
        policy.served(starved, 1.0)
    assert policy.age(starved, STARVE_S)
    assert policy.gives_way(short, starved)
    assert not any(policy.served(starved, 1.0) for _ in range(int(QUANTUM_UNITS))), "it stays there for a quantum"
    assert policy.served(starved, 1.0)
    assert policy.gives_way(starved, short)


@given(
    st.integers(-MOST_PRIORITY, MOST_PRIORITY),
    st.lists(st.tuples(st.sampled_from(["served", "waits"]), st.floats(0.1, 500.0)), max_size=60),
)
def test_at_one_level_and_priority_all_keys_are_equal_whatever_came_before(
    priority: int, past: list[tuple[str, float]]
) -> None:
    policy, now = MultiLevel(StepTime()), 0.0
    job = new_job(now, 10, 10**6, priority=priority)
    policy.enter(job)
    since_front = inf
    for what, much in past:
        before = job.key
        if what == "served":
            changed = policy.served(job, much)
            since_front += much
        else:
            now += much
            changed = policy.age(job, now)
            since_front = 0.0 if changed else since_front
        assert changed == (job.key != before)
        if since_front > QUANTUM_UNITS:
            assert job.key == job.level + priority
        else:
            assert job.key == -MOST_PRIORITY


def test_priority_is_a_head_start_and_bounded() -> None:
    time = StepTime()
    for policy in (Shortest(time), MultiLevel(time)):
        plain, favoured, greedy = (new_job(0.0, 10, 10, 10.0, priority=n) for n in (0, -2, -(10**9)))
        for job in (plain, favoured, greedy):
            policy.enter(job)
        assert favoured.key == plain.key - 2
        assert greedy.key == plain.key - MOST_PRIORITY


@pytest.mark.parametrize("predicted", [None, 0.0, -3.0, float("nan"), float("inf")])
def test_a_prediction_that_cannot_be_is_replaced_and_max_tokens_caps_it(predicted: float | None) -> None:
    assert new_job(0.0, 10, 10_000, predicted).predicted_tokens == PRIOR_TOKENS
    assert new_job(0.0, 10, 7, predicted).predicted_tokens == 7


def test_a_victim_is_served_for_a_while_and_not_for_ever_again() -> None:
    job = new_job(0.0, 10, 10)
    assert not may_be_preempted(job)
    job.since_admission = LEAST_UNITS
    assert may_be_preempted(job)
    job.preemptions = MOST_PREEMPTIONS
    assert not may_be_preempted(job)
