"""How long an engine step is expected to take, from the steps before it.

A step computes some tokens, each of which attends to all tokens before it. Its time is taken to be
`a + b·tokens + c·attended` with constants that are not negative and not known. Then a step takes at most
`seconds · max(1, tokens / measured tokens, attended / measured attended)` for whatever step was measured, a smaller one
too; of all those bounds the least is expected.

Of steps of about the same work (same powers of two) the slowest is kept, and forgotten slowly: O(1) per step, some
hundred entries at most. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.995
"""What a slowest step is worth after the next one of its work: half after 140."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes: `tokens`, and the pairs of one of them and a token that it `attended` to, itself too."""

    tokens: int = 0
    attended: int = 0

    def plus(self, tokens: int, context: int) -> StepWork:
        """With `tokens` of one more request, after `context` others."""
        return StepWork(self.tokens + tokens, self.attended + tokens * context + tokens * (tokens + 1) // 2)


class StepEstimate:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._slowest: dict[tuple[int, int], tuple[StepWork, float]] = {}

    def took(self, work: StepWork, seconds: float) -> None:
        """A step has ended. One that computed no token says nothing."""
        if work.tokens < 1:
            return
        size = (work.tokens.bit_length(), work.attended.bit_length())
        known = self._slowest.get(size)
        if known is None or seconds >= FORGET * known[1]:
            self._slowest[size] = work, seconds
        else:
            self._slowest[size] = known[0], FORGET * known[1]

    def expected_s(self, work: StepWork) -> float | None:
        """Seconds that a step of this work takes at most, undisturbed; None: nothing has been measured."""
        bounds = [
            seconds * max(1.0, work.tokens / known.tokens, work.attended / known.attended)
            for known, seconds in list(self._slowest.values())
        ]
        return min(bounds, default=None)
