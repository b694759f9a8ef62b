"""States are held where another prompt may begin with them and where the conversation may go on, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from counted_pool import Pool

from deployments.engine.held_states import HeldStates
from deployments.engine.request_saves import GivenUp, WhyGivenUp
from deployments.engine.tracked_request import PlannedChain, SaveLimits, SaveProgress, TrackedRequest

BLOCK = 32
PROMPT = 4 * BLOCK


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def states(pool: Pool) -> HeldStates:
    """States lie in blocks 101, 102, … and 301, 302, …, but for what was at the first boundary; tokens in 201, …"""
    tables = ([0, *range(102, 110)], list(range(201, 210)), [0, *range(302, 310)])
    manager: Any = SimpleNamespace(block_pool=pool, get_block_ids=lambda request_id: tables)
    return HeldStates(manager, (0, 2), BLOCK, most_blocks=6)


def request(tokens: int = PROMPT, junction: int = 0, save_answer: bool = True) -> TrackedRequest:
    asked: Any = SimpleNamespace(request_id="one", num_tokens=tokens, num_prompt_tokens=tokens, mm_features=[])
    saving = SaveProgress(limits=SaveLimits(save_answer=save_answer), kept_boundary=junction)
    return TrackedRequest(asked, PlannedChain((), 0, 1.0), saving)


def test_the_last_boundaries_of_a_prompt_are_kept_and_of_an_answer_the_last_one(states: HeldStates, pool: Pool) -> None:
    tracked = request()
    for end in (2, 3, 4):
        states.planned(tracked, end * BLOCK, admitted=end == 2)
    assert states.ready(tracked, 9) == [4, 3]
    assert states.tables(tracked, 3) == [[103], [0], [303]]
    states.saved(tracked, 3)
    states.saved(tracked, 4)
    assert (pool.now, states.blocks) == (set(), 0)
    for end in (5, 6):
        states.planned(tracked, end * BLOCK, admitted=False)
    assert (states.ready(tracked, 9), states.ready(tracked, 6, all_of_them=True)) == ([], [6])
    assert states.ready(tracked, 5, all_of_them=True) == [], "the step that makes them has not been counted"
    states.left(tracked)
    assert (pool.now, states.blocks) == (set(), 0)


def test_a_junction_is_kept_and_a_boundary_inside_a_step_has_no_states(states: HeldStates, pool: Pool) -> None:
    tracked = request(junction=2)
    states.planned(tracked, 2 * BLOCK, admitted=True)
    states.planned(tracked, 4 * BLOCK - 1, admitted=False)
    states.planned(tracked, 5 * BLOCK, admitted=False)
    assert states.ready(tracked, 9) == [2]
    assert pool.now == {102, 302, 105, 305}


def test_nothing_is_held_of_what_vllm_has_freed_or_of_an_answer_that_does_not_come_back(
    states: HeldStates, pool: Pool
) -> None:
    states.planned(request(), BLOCK, admitted=True)
    states.planned(request(save_answer=False), 5 * BLOCK, admitted=True)
    assert pool.now == set()


def test_no_more_is_held_than_a_share_and_other_blocks_after_a_preemption(states: HeldStates, pool: Pool) -> None:
    tracked = request(junction=2)
    for end in (2, 3, 4):
        states.planned(tracked, end * BLOCK, admitted=end == 2)
    assert states.blocks == 6
    states.planned(tracked, 5 * BLOCK, admitted=False)
    states.planned(tracked, 6 * BLOCK, admitted=False)
    assert states.ready(tracked, 9, all_of_them=True) == [4, 3, 2]
    assert states.given_up.counts == {"share": 1, "preempted": 0, "room": 0}, "once a request"
    states.planned(tracked, 2 * BLOCK, admitted=True)
    assert pool.now == {102, 302}
    assert states.given_up.counts == {"share": 1, "preempted": 1, "room": 0}
    states.make_room()
    assert (pool.now, states.blocks, states.ready(tracked, 9, all_of_them=True)) == (set(), 0, [])
    states.make_room()
    assert states.given_up.counts == {"share": 1, "preempted": 1, "room": 1}


def test_what_is_saved_or_ends_was_not_given_up(states: HeldStates, pool: Pool) -> None:
    tracked = request()
    states.planned(tracked, 3 * BLOCK, admitted=True)
    states.saved(tracked, 3)
    states.planned(tracked, 3 * BLOCK, admitted=True)
    states.left(tracked)
    assert not pool.now
    assert set(states.given_up.counts.values()) == {0}


def test_the_log_has_the_first_of_each_reason_and_the_metric_all(own_records: Any) -> None:
    given_up = GivenUp("states")
    for why in (WhyGivenUp.ROOM, WhyGivenUp.ROOM, WhyGivenUp.SHARE):
        given_up.count("one", why)
    assert [record.args[2] for record in own_records()] == ["room", "share"]
    (family,) = given_up.families()
    assert family.name == "crosskv_held_given_up"
    samples = {sample.labels["reason"]: sample.value for sample in family.samples}
    assert samples == {"share": 1, "preempted": 0, "room": 2}
