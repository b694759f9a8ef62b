"""Requests by chance: Poisson arrivals, log-normal lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import log


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths in tokens: `median`, and the standard deviation of their natural logarithm."""

    median: int
    sigma: float

    def draw(self, rng: random.Random, least: int) -> int:
        """One length, at least ``least``."""
        return max(least, int(rng.lognormvariate(log(self.median), self.sigma)))


@dataclass(slots=True, eq=False)
class Job:
    """One request and what became of it. Times are seconds since the replay's begin; 0.0 for what has not happened."""

    number: int
    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    prefill_left: int = 0
    """Tokens to compute before the next one is sampled: the prompt's, and after a preemption the answer's too."""
    answered: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    worst_gap_s: float = 0.0
    preempted: int = 0
    handed_over: bool = False

    def __post_init__(self) -> None:
        self.prefill_left = self.prompt_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV the next step needs, or fills."""
        return self.prompt_tokens + self.answered

    @property
    def ended(self) -> bool:
        """Whether its last token is there."""
        return self.answered >= self.answer_tokens

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time of the tokens after the first; 0 for an answer of one."""
        return (self.last_token_s - self.first_token_s) / max(1, self.answer_tokens - 1)

    def token(self, now: float) -> None:
        """One more token has reached the client."""
        if self.answered:
            self.worst_gap_s = max(self.worst_gap_s, now - self.last_token_s)
        else:
            self.first_token_s = now
        self.answered += 1
        self.last_token_s = now


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives: `rate` requests a second, prompts and answers."""

    rate: float
    prompt: LogNormal
    answer: LogNormal
    jobs: int = field(default=1000)

    def draw(self, seed: int, most_tokens: int) -> list[Job]:
        """Jobs in order of arrival; equal for equal seeds. No job is longer than ``most_tokens``, both together."""
        rng = random.Random(seed)
        drawn: list[Job] = []
        now = 0.0
        for number in range(self.jobs):
            now += rng.expovariate(self.rate)
            answer = min(self.answer.draw(rng, 2), most_tokens // 2)
            drawn.append(Job(number, now, min(self.prompt.draw(rng, 1), most_tokens - answer), answer))
        return drawn
