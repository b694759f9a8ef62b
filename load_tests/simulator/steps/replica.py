"""One engine, step by step: continuous batching with chunked prefill, as vLLM schedules without priorities.

What follows vLLM: running requests come first, in order of admission, each decode one token and each prefill what is
left of the step's budget; then waiting ones are admitted in order of arrival while run slots and KV last. A running
request that finds no room in the pool preempts the one admitted last, which computes all of its tokens again. A
request's KV is counted in tokens, not in blocks, and a prompt's is reserved when it is admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from load_tests.simulator.steps.jobs import Job
from load_tests.simulator.steps.step_cost import StepCost

Schedule = Callable[[float, Callable[[float], None]], None]
"""Call something at a time, in seconds."""

LEAST_PREFILL = 16
"""Tokens of prompts that a step computes however tight its target: prompts behind endless decodes would starve."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`step_tokens` of one step at most, `slots` running requests, `pool_tokens` of KV.

    `target_s`: how long a step that decodes may take; None: as long as it does.
    """

    cost: StepCost
    step_tokens: int
    slots: int
    pool_tokens: int
    target_s: float | None = None


class StepReplica:
    """See the module. ``after_prefill`` hears each first token, and says whether the job leaves with it."""

    def __init__(
        self, spec: EngineSpec, schedule: Schedule, after_prefill: Callable[[float, Job], bool] = lambda now, job: False
    ) -> None:
        self._spec = spec
        self._schedule = schedule
        self._after_prefill = after_prefill
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._busy = False
        self.steps = 0
        self.busy_s = 0.0

    @property
    def prefill_left(self) -> int:
        """Tokens that it has to compute before those that come now: what a router counts."""
        return sum(job.prefill_left for job in self._running) + sum(job.prefill_left for job in self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens of the requests that it has, answered so far: the KV that a router knows of."""
        return sum(job.context_tokens for job in self._running) + sum(job.context_tokens for job in self._waiting)

    def add(self, now: float, job: Job) -> None:
        """A request arrives, with its prompt's KV where ``prefill_left`` is 0."""
        self._waiting.append(job)
        if not self._busy:
            self._step(now)

    def _step(self, now: float) -> None:
        self._make_room()
        decodes = [job for job in self._running if not job.prefill_left]
        context = sum(job.context_tokens for job in decodes)
        prefills: list[tuple[Job, int]] = []
        left = self._prefill_budget(len(decodes), context)
        for job in self._running:
            if job.prefill_left and left > 0:
                prefills.append((job, min(job.prefill_left, left)))
                left -= prefills[-1][1]
        while (
            self._waiting and len(self._running) < self._spec.slots and (left > 0 or not self._waiting[0].prefill_left)
        ):
            job = self._waiting[0]
            if self._used() + job.context_tokens + 1 > self._spec.pool_tokens:
                break
            self._running.append(self._waiting.popleft())
            if job.prefill_left:
                prefills.append((job, min(job.prefill_left, left)))
                left -= prefills[-1][1]
            else:
                decodes.append(job)
                context += job.context_tokens
        computed = sum(tokens for _, tokens in prefills)
        self._busy = bool(decodes or computed)
        if self._busy:
            seconds = self._spec.cost.seconds(len(decodes), computed, context)
            self.steps += 1
            self.busy_s += seconds
            self._schedule(now + seconds, lambda then: self._end_step(then, decodes, prefills))

    def _prefill_budget(self, decodes: int, context: int) -> int:
        ceiling = self._spec.step_tokens - decodes
        if self._spec.target_s is None or not decodes:
            return ceiling
        return min(ceiling, max(LEAST_PREFILL, self._spec.cost.prefill_budget(self._spec.target_s, decodes, context)))

    def _used(self) -> int:
        return sum(job.context_tokens for job in self._running)

    def _make_room(self) -> None:
        """Each running request may need one more token's KV in this step."""
        while len(self._running) > 1 and self._used() + len(self._running) > self._spec.pool_tokens:
            victim = self._running.pop()
            victim.prefill_left = victim.context_tokens
            victim.preempted += 1
            self._waiting.appendleft(victim)

    def _end_step(self, now: float, decodes: list[Job], prefills: list[tuple[Job, int]]) -> None:
        for job in decodes:
            job.token(now)
        left: list[Job] = []
        for job, tokens in prefills:
            job.prefill_left -= tokens
            if not job.prefill_left:
                was_first = not job.answered
                job.token(now)
                if was_first and not job.ended and self._after_prefill(now, job):
                    left.append(job)
        self._running = [job for job in self._running if not job.ended and job not in left]
        self._step(now)
