"""Which job runs next: the first to come; the shortest; or by multi-level feedback, for lengths without a prediction.

* `fcfs`: in order of arrival, no job is preempted.
* `shortest`: key ``arrival + OVERTAKING · predicted seconds``, computed once. A job is overtaken only by those that
  arrive within `OVERTAKING` times its own length: what waits ages by itself. It preempts for a job of at most half of
  what the victim has left. Covers shortest-job-first with predictions (Sequence Scheduling, arXiv 2305.13144).
* `mlfq`: FastServe (arXiv 2305.05920): a job joins the first level whose quantum holds its first iteration, falls by
  one level for each quantum that it has used up, and goes to the front after `STARVE_S` of waiting, for one quantum of
  the first level. Each quantum is four times the one before: by doubling all long jobs would end late, and by more a
  long one would hold up others.

Work is counted in time, by measured rates (`kvmanager.scheduling.step_time`), not in tokens: a decoded token costs as
much as 3 to 40 prefill tokens.

**Bounds on thrash** (`may_be_preempted`): a victim was served `LEAST_UNITS` since it was admitted, and was preempted
fewer than `MOST_PREEMPTIONS` times; keys are compared strictly, without a tie-break, so equals never change places.
The caller preempts one job a step at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import Literal, Protocol, TypeAlias, TypeVar

from kvmanager.scheduling.jobs import MOST_PRIORITY, ScheduledJob
from kvmanager.scheduling.step_time import StepTime

PolicyName: TypeAlias = Literal["fcfs", "shortest", "mlfq"]

LEAST_UNITS = 8.0
MOST_PREEMPTIONS = 6
OVERTAKING = 16.0
"""Units are engine time: a job that shares its steps with three others is there four times as long as it is served."""
GAP = 2.0
"""`shortest`: how many times more a victim has left than the job that takes its place."""
LEVELS = 5
QUANTUM_UNITS = 64.0
"""Of the first level."""
QUANTUM_GROWTH = 4.0
STARVE_S = 20.0
_FRONT = -float(MOST_PRIORITY)
T = TypeVar("T")


class Policy(Protocol):
    """What decides. Sets `ScheduledJob.key`, and reads the times that `StepTime` measures."""

    name: PolicyName

    def enter(self, job: ScheduledJob) -> None:
        """Give a new job its key."""
        ...

    def served(self, job: ScheduledJob, units: float) -> bool:
        """A running job was served; returns whether its key is another one now."""
        ...

    def age(self, job: ScheduledJob, now: float) -> bool:
        """A job waits; returns whether its key is another one now."""
        ...

    def gives_way(self, victim: ScheduledJob, to: ScheduledJob) -> bool:
        """Whether a running job, which may be preempted, makes place for a waiting one."""
        ...

    def rank(self, victim: ScheduledJob) -> float:
        """Of those that give way, the one with the highest rank goes."""
        ...


class Fcfs:
    """See the module's docstring."""

    name: PolicyName = "fcfs"

    def enter(self, job: ScheduledJob) -> None:
        """All keys are equal: arrival decides."""
        job.key = 0.0

    def served(self, job: ScheduledJob, units: float) -> bool:
        """Changes nothing."""
        return False

    def age(self, job: ScheduledJob, now: float) -> bool:
        """Changes nothing."""
        return False

    def gives_way(self, victim: ScheduledJob, to: ScheduledJob) -> bool:
        """No job does."""
        return False

    def rank(self, victim: ScheduledJob) -> float:
        """All are equal: no job gives way."""
        return 0.0


class Shortest:
    """See the module's docstring."""

    name: PolicyName = "shortest"

    def __init__(self, time: StepTime) -> None:
        self._time = time

    def units_left(self, job: ScheduledJob) -> float:
        """What a job still needs, in units."""
        return self._time.units(job.left_tokens, job.answer_left)

    def enter(self, job: ScheduledJob) -> None:
        """Once: a key that changed with the predicted rest would let a job be overtaken for ever."""
        units = self._time.units(job.prefill_tokens, job.predicted_tokens)
        job.key = _finite(job.entered + OVERTAKING * units * self._time.decode_s + job.priority)

    def served(self, job: ScheduledJob, units: float) -> bool:
        """Changes nothing."""
        return False

    def age(self, job: ScheduledJob, now: float) -> bool:
        """Changes nothing: those that come later have later keys."""
        return False

    def gives_way(self, victim: ScheduledJob, to: ScheduledJob) -> bool:
        """For a job of at most half of the rest that comes first by its key too."""
        return to.key < victim.key and GAP * self.units_left(to) <= self.units_left(victim)

    def rank(self, victim: ScheduledJob) -> float:
        """The job that has most left goes first."""
        return self.units_left(victim)


class MultiLevel:
    """See the module's docstring."""

    name: PolicyName = "mlfq"

    def __init__(self, time: StepTime) -> None:
        self._time = time

    def quantum(self, level: int) -> float:
        """Units that a job may be served at a level."""
        return QUANTUM_UNITS * QUANTUM_GROWTH**level if level < LEVELS - 1 else inf

    def enter(self, job: ScheduledJob) -> None:
        """FastServe's skip-join: a long prompt does not push its way through all levels first."""
        first = self._time.units(job.prefill_tokens, 1.0)
        job.level = next(level for level in range(LEVELS) if first <= self.quantum(level))
        job.key = self._key(job)

    def served(self, job: ScheduledJob, units: float) -> bool:
        """Fall by a level when the quantum is used up; a promotion ends with it."""
        job.level_units += units
        if job.level_units <= self.quantum(job.level):
            return False
        job.level, job.level_units, job.promoted = job.level + 1, 0.0, False
        job.key = self._key(job)
        return True

    def age(self, job: ScheduledJob, now: float) -> bool:
        """To the front, before whatever has a priority, after a while."""
        if now - job.waiting_since < STARVE_S or job.key <= _FRONT:
            return False
        job.level, job.level_units, job.waiting_since, job.promoted = 0, 0.0, now, True
        job.key = self._key(job)
        return True

    def _key(self, job: ScheduledJob) -> float:
        """Of the job's level and priority, and of nothing that it was before."""
        return _FRONT if job.promoted else _finite(float(job.level + job.priority))

    def gives_way(self, victim: ScheduledJob, to: ScheduledJob) -> bool:
        """To a job of an earlier level."""
        return to.key < victim.key

    def rank(self, victim: ScheduledJob) -> float:
        """The job at the last level goes first."""
        return victim.key


def make_policy(name: PolicyName, time: StepTime) -> Policy:
    """The policy of that name, by measured times. Raises KeyError for an unknown one."""
    makers: dict[str, type[Shortest] | type[MultiLevel]] = {"shortest": Shortest, "mlfq": MultiLevel}
    return Fcfs() if name == "fcfs" else makers[name](time)


def may_be_preempted(job: ScheduledJob) -> bool:
    """The bounds on thrash: see the module's docstring."""
    return job.since_admission >= LEAST_UNITS and job.preemptions < MOST_PREEMPTIONS


def victim_for(policy: Policy, to: ScheduledJob, running: Iterable[tuple[T, ScheduledJob]]) -> T | None:
    """Return the running job that makes place for a waiting one, the last of equals; None where none does."""
    chosen: tuple[float, T] | None = None
    for name, job in running:
        if may_be_preempted(job) and policy.gives_way(job, to):
            rank = policy.rank(job)
            if chosen is None or rank >= chosen[0]:
                chosen = rank, name
    return chosen[1] if chosen is not None else None


def _finite(key: float) -> float:
    if not isfinite(key):
        raise ValueError(f"a key of {key} orders nothing")
    return key
