"""What the benchmark of schedulers says: ratios of the same seed, a sentence for each target that was missed."""

from __future__ import annotations

from dataclasses import replace

from load_tests.scheduling.gaps import Gaps
from load_tests.scheduling.mixed import LONG_ANSWER, LONG_PROMPT, Run, jobs_of
from load_tests.scheduling.report import comparisons, gap_table, kept_table, misses, policy_table

FCFS_RUN = Run(4.0, 9.0, 6.0, 3.0, 10.0, 8.0, 300.0, 30.0, ["a"])
GOOD = replace(FCFS_RUN, mean_s=2.0, short_p95_s=1.0, long_max_s=15.0, tokens_per_s=290.0)
WITHOUT = Gaps(0.01, 0.03, 0.06, 0.08, 0.2, 100)
HELD = Gaps(0.01, 0.02, 0.03, 0.04, 0.25, 100)
COUNTED = {"crosskv_preempted_tokens_total.kept": 990.0, "crosskv_preempted_tokens_total.recomputed": 10.0}


def test_equal_seeds_give_equal_jobs_and_one_in_five_is_long() -> None:
    jobs = jobs_of(3, 2000)
    assert jobs[:50] == jobs_of(3, 50)
    assert jobs[:5] != jobs_of(4, 5)
    long = [job for job in jobs if job.is_long]
    assert 0.15 < len(long) / len(jobs) < 0.25
    assert all(len(job.tokens) in range(*LONG_PROMPT) and job.answer in range(*LONG_ANSWER) for job in long)


def test_ratios_are_to_fcfs_of_the_same_seed() -> None:
    runs = {"fcfs": [FCFS_RUN, replace(FCFS_RUN, mean_s=8.0)], "mlfq": [GOOD, replace(GOOD, mean_s=6.0)]}
    mean = comparisons(runs)[0]
    assert mean.ratio("mlfq").as_list() == [0.5, 0.625, 0.75]
    assert "mean completion" in policy_table(runs)


def test_what_keeps_to_all_targets_is_not_blamed() -> None:
    runs = {"fcfs": [FCFS_RUN], "shortest": [GOOD], "mlfq": [GOOD]}
    wrong = {"fcfs": (0, 1), "shortest": (0, 1), "mlfq": (0, 1)}
    assert misses(runs, {"mlfq": COUNTED}, wrong, 0.03, [WITHOUT], [HELD]) == []


def test_each_target_that_is_missed_is_a_sentence() -> None:
    bad = replace(FCFS_RUN, long_max_s=30.0, tokens_per_s=100.0)
    counted = {"mlfq": {**COUNTED, "crosskv_preempted_tokens_total.recomputed": 500.0}}
    slow = replace(HELD, p99_s=0.06, ttft_s=0.5)
    said = misses({"fcfs": [FCFS_RUN], "mlfq": [bad]}, counted, {"mlfq": (2, 10)}, 0.03, [WITHOUT], [slow])
    assert len(said) == 8, "mean, p95 of short ones, longest, tokens, recomputed, wrong, gaps, first tokens"


def test_tables_say_what_was_counted() -> None:
    table = kept_table({"mlfq": COUNTED}, {"mlfq": (0, 240)})
    assert "| 1000 | 1.0% | 0 of 240 |" in table
    assert "1.00" in gap_table(0.03, [WITHOUT], [HELD])
