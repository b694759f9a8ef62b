"""A request as a scheduling policy sees it: its work in *units* (`kvmanager.scheduling.step_time`), its place and past.

A policy orders jobs by `key`: the least runs first, equals by arrival. Times are seconds on one clock.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_PRIORITY = 8
"""The most that a request's `priority` counts, either way, whatever let it in: no request is put off for ever."""
PRIOR_TOKENS = 256
"""How long an answer is expected to be of which nothing is predicted. Chosen, not measured."""


@dataclass(slots=True)
class ScheduledJob:
    """One request in one engine, from its entry to its end."""

    entered: float
    prefill_tokens: int
    """Of its prompt, what no cache is known to have."""
    predicted_tokens: float
    """Of its answer."""
    most_tokens: int
    """Of its answer."""
    priority: int = 0
    """Lower is sooner, as in vLLM."""
    key: float = 0.0
    level: int = 0
    """mlfq: its queue."""
    level_units: float = 0.0
    """What it was served since it came to its level."""
    promoted: bool = False
    """mlfq: it waited too long, and comes before all others until it was served a quantum."""
    since_admission: float = 0.0
    """Units that it was served since it last got a run slot."""
    waiting_since: float = 0.0
    left_tokens: int = 0
    """To be computed before it can decode: of its prompt, or of what a preemption threw away."""
    answered: int = 0
    preemptions: int = 0

    @property
    def answer_left(self) -> float:
        """Tokens that its answer is expected to have still. One longer than predicted is taken to be half done.

        Answers' lengths have long tails: what has lasted long is expected to last as long again.
        """
        left = self.predicted_tokens - self.answered
        if left < 1:
            left = float(self.answered)
        return max(1.0, min(left, float(self.most_tokens - self.answered)))


def new_job(
    now: float, prefill_tokens: int, most_tokens: int, predicted_tokens: float | None = None, priority: int = 0
) -> ScheduledJob:
    """A request that enters. ``predicted_tokens`` that cannot be are replaced by what is expected of any answer."""
    if predicted_tokens is None or not 0 < predicted_tokens < float("inf"):
        predicted_tokens = PRIOR_TOKENS
    most_tokens = max(1, most_tokens)
    return ScheduledJob(
        entered=now,
        prefill_tokens=max(0, prefill_tokens),
        predicted_tokens=min(float(predicted_tokens), float(most_tokens)),
        most_tokens=most_tokens,
        priority=min(max(priority, -MOST_PRIORITY), MOST_PRIORITY),
        waiting_since=now,
        left_tokens=max(0, prefill_tokens),
    )
