"""An engine in a few lines: run slots, a queue by key, a preemption a step. What a policy does with it, by steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmanager.scheduling.jobs import ScheduledJob, new_job
from kvmanager.scheduling.policies import MOST_PREEMPTIONS, Policy, make_policy, victim_for
from kvmanager.scheduling.step_time import StepTime

STEP_S = 0.01


@dataclass
class Arrival:
    """A job to come: when, and how many tokens it has; `predicted` may be far off."""

    at_step: int
    prompt: int
    answer: int
    predicted: float | None = None
    priority: int = 0


@dataclass
class Slots:
    """Every running job gets one token a step, a prompt counts as a tenth of a token each."""

    policy: Policy
    slots: int
    step: int = 0
    waiting: dict[int, ScheduledJob] = field(default_factory=dict)
    running: dict[int, ScheduledJob] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    preempted: list[tuple[int, int]] = field(default_factory=list)
    """(step, job)"""
    served_at_preemption: list[float] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.step * STEP_S

    def enter(self, name: int, arrival: Arrival) -> None:
        job = new_job(self.now, arrival.prompt, arrival.answer, arrival.predicted, arrival.priority)
        self.policy.enter(job)
        self.waiting[name] = job
        self.left[name] = arrival.answer + arrival.prompt / 10

    def first_waiting(self) -> int | None:
        return min(self.waiting, key=lambda name: (self.waiting[name].key, name), default=None)

    def run_step(self) -> None:
        for job in self.waiting.values():
            self.policy.age(job, self.now)
        first = self.first_waiting()
        if first is not None and len(self.running) >= self.slots:
            victim = victim_for(self.policy, self.waiting[first], self.running.items())
            if victim is not None:
                job = self.running.pop(victim)
                self.served_at_preemption.append(job.since_admission)
                job.preemptions += 1
                job.since_admission, job.waiting_since = 0.0, self.now
                self.waiting[victim] = job
                self.preempted.append((self.step, victim))
        while len(self.running) < self.slots and (first := self.first_waiting()) is not None:
            self.running[first] = self.waiting.pop(first)
        for name, job in list(self.running.items()):
            self.left[name] -= 1.0
            job.since_admission += 1.0
            job.answered += 1
            job.left_tokens = 0
            self.policy.served(job, 1.0)
            if self.left[name] <= 0:
                del self.running[name]
                self.ended[name] = self.step
        self.step += 1


def run(name: str, arrivals: list[Arrival], slots: int = 2, most_steps: int = 200_000) -> Slots:
    """Until all have ended."""
    engine = Slots(make_policy(name, StepTime()), slots)  # type: ignore[arg-type]
    coming = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_step)
    while len(engine.ended) < len(arrivals):
        while coming and coming[0][1].at_step <= engine.step:
            engine.enter(*coming.pop(0))
        engine.run_step()
        assert engine.step < most_steps, "somebody starves"
    assert all(sum(who == job for _, who in engine.preempted) <= MOST_PREEMPTIONS for job in range(len(arrivals)))
    return engine
