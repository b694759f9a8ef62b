"""The machines that the tables are of, with what a step costs there. Seconds and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from load_tests.simulator.steps.fleet import Handover
from load_tests.simulator.steps.jobs import LogNormal
from load_tests.simulator.steps.replica import EngineSpec
from load_tests.simulator.steps.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Machine:
    """`rates`: requests a second; `target_s`: of the arm with a TPOT target; `slo_ttft_s`, `slo_tpot_s`: both hold."""

    name: str
    replicas: int
    engine: EngineSpec
    handover: Handover
    prompt: LogNormal
    answer: LogNormal
    rate: float
    jobs: int
    target_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    said: str
    """Where the costs are from."""


MACHINES = {
    "cpu": Machine(
        name="Two replicas on two cores, a model of 40m parameters",
        replicas=2,
        engine=EngineSpec(StepCost(17e-3, 1.4e-3, 1.0e-3), step_tokens=512, slots=32, pool_tokens=8_160),
        handover=Handover(20e-3, 40e-6),
        prompt=LogNormal(500, 0.8),
        answer=LogNormal(60, 0.6),
        rate=0.8,
        jobs=1_000,
        target_s=0.12,
        slo_ttft_s=3.0,
        slo_tpot_s=0.15,
        said="Steps, saves and loads are about as measured (docs/measured/experiments.md)",
    ),
    "gpu": Machine(
        name="Eight GPUs of 80 GB, a model of 8B parameters",
        replicas=8,
        engine=EngineSpec(StepCost(8e-3, 0.02e-3, 0.05e-3, 44e-9), step_tokens=2_048, slots=128, pool_tokens=400_000),
        handover=Handover(4e-3, 2 * 131_072 / 20e9),
        prompt=LogNormal(3_000, 0.7),
        answer=LogNormal(200, 0.6),
        rate=24.0,
        jobs=2_000,
        target_s=0.04,
        slo_ttft_s=2.0,
        slo_tpot_s=0.05,
        said="Assumed, not measured: 20,000 prefill tokens/s; 128 KiB of KV a token, read at 3 TB/s, moved at 20 GB/s",
    ),
}
