"""Replicas and the requests that each gets: all alike, or some that prefill and some that decode.

A request goes to the replica with the least prefill left (no cache is simulated, so nothing else tells them apart), one
that is handed over to the one that holds the least KV. With roles, prompts of up to ``split_above`` tokens stay whole
on a decode replica, as they do in the server (`kvmanager.scheduling.rebalancing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from load_tests.simulator.events import Events
from load_tests.simulator.steps.jobs import Job
from load_tests.simulator.steps.replica import EngineSpec, StepReplica


@dataclass(frozen=True, slots=True)
class Handover:
    """What a prompt's way to a decode replica takes: one hop, the save's end, the load. The client has a token then."""

    base_s: float
    token_s: float

    def seconds(self, prompt_tokens: int) -> float:
        """From the first token on a prefill replica until its decode replica can go on."""
        return self.base_s + self.token_s * prompt_tokens


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to use the replicas: `prefill` + `decode` of them with roles, none where both are 0.

    `target_s`: of the steps that decode; `split_above`: tokens.
    """

    name: str
    prefill: int = 0
    decode: int = 0
    target_s: float | None = None
    split_above: int = 0


class Fleet:
    """One replay of jobs through one arm."""

    def __init__(self, spec: EngineSpec, replicas: int, arm: Arm, handover: Handover) -> None:
        """Raises ValueError where the roles are not as many as the replicas."""
        if arm.prefill + arm.decode not in (0, replicas) or (arm.prefill == 0) != (arm.decode == 0):
            raise ValueError(f"{arm.prefill} + {arm.decode} roles do not share out {replicas} replicas")
        self._arm = arm
        self._handover = handover
        self._events = Events()
        spec = replace(spec, target_s=arm.target_s)
        self._decoders = [StepReplica(spec, self._events.at) for _ in range(arm.decode or replicas)]
        self._prefillers = [StepReplica(spec, self._events.at, self._hand_over) for _ in range(arm.prefill)]

    def replay(self, jobs: Sequence[Job]) -> None:
        """Run until the last job has ended; the jobs say what became of them."""
        for job in jobs:
            self._events.at(job.arrival_s, lambda now, job=job: self._entry(job).add(now, job))  # type: ignore[misc]
        self._events.run_until()

    def _entry(self, job: Job) -> StepReplica:
        splits = bool(self._prefillers) and job.prompt_tokens > self._arm.split_above
        return min(self._prefillers if splits else self._decoders, key=lambda one: one.prefill_left)

    def _hand_over(self, now: float, job: Job) -> bool:
        job.handed_over = True
        self._events.at(now + self._handover.seconds(job.prompt_tokens), lambda then: self._decoder().add(then, job))
        return True

    def _decoder(self) -> StepReplica:
        return min(self._decoders, key=lambda one: one.context_tokens)
