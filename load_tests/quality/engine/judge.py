"""What answers of a question come to: right or not, and how far each step's distribution is from a prefill's. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from load_tests.quality.engine.questions import Question

WHOLE, BLENDED, RANDOM, NAIVE = "whole prefill", "blended", "as many random tokens", "none of the reused tokens"
ARMS = (WHOLE, BLENDED, RANDOM, NAIVE)
UNSAID = -20.0
"""The log-probability of a token that is not among those which the engine says."""


@dataclass(frozen=True)
class Answer:
    """Tokens, and for each step the log-probabilities of the likeliest ones."""

    tokens: list[int]
    steps: list[dict[int, float]]


def divergences(answer: Answer, whole: Answer) -> list[float]:
    """KL in nats of each step's distribution from a prefill's, as long as both have read the same tokens."""
    found = []
    for mine, theirs, q, p in zip(answer.tokens, whole.tokens, answer.steps, whole.steps, strict=True):
        found.append(max(0.0, sum(math.exp(x) * (x - q.get(token, UNSAID)) for token, x in p.items())))
        if mine != theirs:
            break
    return found


class Answers(Protocol):
    """See `load_tests.quality.engine.asking.Asking`."""

    def answers(self, question: Question) -> Mapping[str, Answer]:
        """Of every arm."""


@dataclass
class Arm:
    """What one way of asking came to."""

    right: list[bool]
    divergences: list[float]

    @property
    def share(self) -> float:
        """Of right answers."""
        return sum(self.right) / len(self.right)

    @property
    def kl(self) -> float:
        """Mean over all steps that were judged."""
        return sum(self.divergences) / len(self.divergences) if self.divergences else 0.0


def judged(asking: Answers, asked: Sequence[Question], tick: Callable[[], object] = lambda: None) -> dict[str, Arm]:
    """Every arm on every question."""
    found = {arm: Arm([], []) for arm in ARMS}
    for question in asked:
        answers = asking.answers(question)
        for name, arm in found.items():
            arm.right.append(answers[name].tokens == question.answer)
            if name != WHOLE:
                arm.divergences += divergences(answers[name], answers[WHOLE])
        tick()
    return found
