"""Engines step by step: what a step holds, what it takes, and who pays for whom."""

from __future__ import annotations

import heapq
import itertools

import pytest

from load_tests.simulator.steps.fleet import Arm, Fleet, Handover
from load_tests.simulator.steps.jobs import Job, Load, LogNormal
from load_tests.simulator.steps.replica import EngineSpec, StepReplica
from load_tests.simulator.steps.step_cost import StepCost

COST = StepCost(base_s=1.0, decode_s=0.1, prefill_s=0.01, context_s=0.0)


def engine(**changes):
    return EngineSpec(**{"cost": COST, "step_tokens": 100, "slots": 8, "pool_tokens": 10_000, **changes})


ALIKE, AT_ONCE = Arm("all alike"), Handover(0.0, 0.0)


def replay(jobs, spec, arm=ALIKE, replicas=1, handover=AT_ONCE):
    Fleet(spec, replicas, arm, handover).replay(jobs)
    assert all(job.ended for job in jobs)
    return jobs


class TestSteps:
    def test_a_prompt_is_computed_in_chunks_and_then_decoded(self):
        (job,) = replay([Job(0, 0.0, 250, 4)], engine())
        assert job.ttft_s == pytest.approx(3 * 1.0 + 250 * 0.01)
        assert job.tpot_s == pytest.approx(1.1)

    def test_a_step_reads_the_context_of_what_it_decodes(self):
        (job,) = replay([Job(0, 0.0, 50, 3)], engine(cost=StepCost(1.0, 0.1, 0.01, 0.001)))
        assert job.last_token_s - job.first_token_s == pytest.approx(2 * 1.1 + 0.051 + 0.052)

    def test_a_decode_waits_for_the_prompt_that_shares_its_step(self):
        first, _ = replay([Job(0, 0.0, 1, 10), Job(1, 1.5, 500, 2)], engine())
        assert first.worst_gap_s == pytest.approx(1.0 + 0.1 + 99 * 0.01)

    def test_a_target_bounds_the_steps_that_decode_and_no_others(self):
        first, second = replay([Job(0, 0.0, 1, 40), Job(1, 1.5, 500, 2)], engine(), Arm("target", target_s=1.4))
        assert first.worst_gap_s == pytest.approx(1.4)
        (alone,) = replay([Job(0, 0.0, 500, 2)], engine(), Arm("target", target_s=1.4))
        assert alone.ttft_s == pytest.approx(5 * 2.0)
        assert second.ttft_s > alone.ttft_s

    def test_a_target_that_no_step_can_meet_still_lets_prompts_through(self):
        jobs = [Job(0, 0.0, 1, 400), Job(1, 1.5, 500, 2)]
        first, second = replay(jobs, engine(), Arm("target", target_s=0.5))
        assert second.first_token_s < first.last_token_s

    def test_no_more_run_than_there_are_slots_and_waiting_ones_keep_their_order(self):
        jobs = replay([Job(n, n * 0.001, 10, 5) for n in range(6)], engine(slots=2))
        firsts = [job.first_token_s for job in jobs]
        assert firsts == sorted(firsts)
        assert firsts[2] >= jobs[0].last_token_s

    def test_a_pool_that_runs_full_preempts_the_last_and_all_end(self):
        jobs = replay([Job(n, 0.0, 40, 40) for n in range(3)], engine(pool_tokens=170))
        assert [job.preempted > 0 for job in jobs] == [False, False, True]
        assert [job.answered for job in jobs] == [40, 40, 40]


class TestRoles:
    def test_the_first_token_comes_before_the_hand_over_and_the_second_after(self):
        (job,) = replay([Job(0, 0.0, 100, 3)], engine(), Arm("roles", 1, 1), 2, Handover(5.0, 0.02))
        assert job.handed_over
        assert job.ttft_s == pytest.approx(2.0)
        assert job.worst_gap_s == pytest.approx(5.0 + 2.0 + 1.1)

    def test_a_decode_replica_is_not_held_up_by_prompts(self):
        jobs = [Job(0, 0.0, 1, 40), Job(1, 1.5, 900, 2)]
        first, _ = replay(jobs, engine(), Arm("roles", 1, 1), 2)
        assert first.worst_gap_s < 1.5

    def test_what_is_short_or_ends_with_its_first_token_is_not_handed_over(self):
        short, long, one = replay(
            [Job(0, 0.0, 50, 3), Job(1, 0.0, 51, 3), Job(2, 0.0, 90, 1)],
            engine(),
            Arm("roles", 1, 1, split_above=50),
            2,
        )
        assert [job.handed_over for job in (short, long, one)] == [False, True, False]

    @pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (3, 1), (3, 0), (0, 3)])
    def test_roles_that_do_not_add_up_are_refused(self, prefill, decode):
        with pytest.raises(ValueError, match="do not share out 3 replicas"):
            Fleet(engine(), 3, Arm("roles", prefill, decode), Handover(0.0, 0.0))


class TestLoad:
    LOAD = Load(2.0, LogNormal(100, 0.5), LogNormal(20, 0.5), jobs=400)

    def test_equal_seeds_draw_equal_jobs(self):
        drawn = [[(job.arrival_s, job.prompt_tokens, job.answer_tokens) for job in self.LOAD.draw(seed, 1000)]
                 for seed in (1, 1, 2)]  # fmt: skip
        assert drawn[0] == drawn[1] != drawn[2]

    def test_lengths_and_rate_are_those_named_and_none_is_longer_than_the_pool(self):
        jobs = self.LOAD.draw(3, 150)
        assert sorted(job.prompt_tokens for job in jobs)[200] == pytest.approx(100, rel=0.15)
        assert jobs[-1].arrival_s == pytest.approx(200, rel=0.2)
        assert max(job.prompt_tokens + job.answer_tokens for job in jobs) <= 150


def test_a_replica_that_has_nothing_to_do_takes_no_steps():
    events = []
    numbers = itertools.count()
    replica = StepReplica(engine(), lambda when, call: heapq.heappush(events, (when, next(numbers), call)))
    replica.add(0.0, Job(0, 0.0, 10, 2))
    while events:
        when, _, call = heapq.heappop(events)
        call(when)
    assert replica.steps == 2
    assert replica.prefill_left == 0 == replica.context_tokens
