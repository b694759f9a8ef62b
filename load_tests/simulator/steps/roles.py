"""Runs the arms of a machine: all replicas alike, with a TPOT target, and every way to share them out among roles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from load_tests.simulator.steps.fleet import Arm, Fleet
from load_tests.simulator.steps.jobs import Job, Load
from load_tests.simulator.steps.machines import Machine


@dataclass(frozen=True, slots=True)
class Row:
    """One arm's figures: seconds, and shares from 0 to 1."""

    arm: str
    prefill: int
    decode: int
    rate: float
    jobs: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    worst_gap_p99_s: float
    mean_completion_s: float
    in_slo: float
    handed_over: float
    preemptions: int

    def as_data(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def arms(machine: Machine, split_above: int) -> list[Arm]:
    """What is compared, the plainest first."""
    shared = [
        Arm(f"{prefill} prefill + {machine.replicas - prefill} decode", prefill, machine.replicas - prefill,
            split_above=split_above)
        for prefill in range(1, machine.replicas)
    ]  # fmt: skip
    target = Arm(f"all alike, TPOT target {machine.target_s * 1e3:.0f} ms", target_s=machine.target_s)
    return [Arm("all alike"), target, *shared]


def run_arm(machine: Machine, arm: Arm, load: Load, seed: int) -> Row:
    """Replay the load, the same for every arm of a seed."""
    jobs = load.draw(seed, machine.engine.pool_tokens - 1)
    Fleet(machine.engine, machine.replicas, arm, machine.handover).replay(jobs)
    return _row(machine, arm, load, jobs)


def _row(machine: Machine, arm: Arm, load: Load, jobs: Sequence[Job]) -> Row:
    in_slo = sum(job.ttft_s <= machine.slo_ttft_s and job.tpot_s <= machine.slo_tpot_s for job in jobs)
    ttft, tpot = sorted(job.ttft_s for job in jobs), sorted(job.tpot_s for job in jobs)
    return Row(
        arm=arm.name,
        prefill=arm.prefill,
        decode=arm.decode,
        rate=load.rate,
        jobs=len(jobs),
        ttft_p50_s=_quantile(ttft, 0.5),
        ttft_p99_s=_quantile(ttft, 0.99),
        tpot_p50_s=_quantile(tpot, 0.5),
        tpot_p99_s=_quantile(tpot, 0.99),
        worst_gap_p99_s=_quantile(sorted(job.worst_gap_s for job in jobs), 0.99),
        mean_completion_s=statistics.fmean(job.last_token_s - job.arrival_s for job in jobs),
        in_slo=in_slo / len(jobs),
        handed_over=sum(job.handed_over for job in jobs) / len(jobs),
        preemptions=sum(job.preempted for job in jobs),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
