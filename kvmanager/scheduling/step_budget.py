"""How many tokens a step may compute so that decoding requests wait for their next token no longer than a target.

A prompt that is prefilled in chunks shares its steps with requests that decode (Orca's iteration-level scheduling), and
they wait for the whole step. The longest chunk that keeps to the target is computed from the measured time of a step
(`kvmanager.scheduling.step_time`), again for each step (Sarathi-Serve, arXiv 2403.02310, chooses it once).

The model says what a step takes on average. `margin` is how much longer the slow ones took, a quantile that is followed
by stochastic approximation; what passes between two steps is subtracted too. One thread.
"""

from __future__ import annotations

from kvmanager.scheduling.step_time import Step, StepTime

QUANTILE = 0.98
"""Of measured over expected time: the share of steps with a prefill that should keep to the target."""
RATE = 0.05
"""How far one step moves the margin. Prompts are few."""
MOST_MARGIN = 2.0
BETWEEN_KEPT = 0.75
"""What the time between steps is worth after the next one. It changes at once when directives come, or an extension
computes."""
MOST_GROWTH = 2
"""How much longer than the longest that was measured a prefill may be: nothing is known of longer ones."""
LARGEST_BETWEEN = 0.5
"""Share of the target that the time between steps may take from it."""


class StepBudget:
    """See the module's docstring."""

    def __init__(self, target_s: float, ceiling_tokens: int, block_tokens: int, time: StepTime) -> None:
        """`ceiling_tokens`: the most that a step ever computes. Raises ValueError for what cannot be."""
        if not target_s > 0 or ceiling_tokens < 1 or block_tokens < 1:
            raise ValueError(f"no step can be held to {target_s} s, {ceiling_tokens} tokens of {block_tokens} a block")
        self.target_s = target_s
        self.margin = 1.0
        self._ceiling = ceiling_tokens
        self._block = block_tokens
        self._time = time
        self._between_s = 0.0

    def took(self, step: Step, seconds: float) -> None:
        """A step has ended: how far is what it took from what is expected? Before `StepTime.took` hears of it.

        One that only decodes says nothing: it is short, and a hiccup of the machine is much of it.
        """
        if not (step.decodes and step.prefill and self._time.most_prefill and self._time.known and seconds > 0):
            return
        expected = self._time.seconds(step)
        if expected <= 0:
            return
        above = seconds > expected * self.margin
        self.margin *= 1.0 + RATE * (QUANTILE if above else QUANTILE - 1.0)
        self.margin = min(max(self.margin, 1.0), MOST_MARGIN)

    def passed_between(self, seconds: float) -> None:
        """Note that ``seconds`` passed between two steps while a request was decoding."""
        self._between_s = BETWEEN_KEPT * self._between_s + (1.0 - BETWEEN_KEPT) * max(0.0, seconds)

    @property
    def room_s(self) -> float:
        """What a step may take on average."""
        between = min(self._between_s, LARGEST_BETWEEN * self.target_s)
        return (self.target_s - between) / self.margin

    def tokens(self, decodes: int, decode_context: int, prefill_context: int) -> int:
        """The budget of the next step: `decodes` requests with `decode_context` tokens in all, and prefills.

        `prefill_context`: tokens before those that are prefilled first. Whole blocks besides the decodes, at least one:
        with less the last requests of vLLM's list would starve. The ceiling without decodes, or when nothing is known.
        """
        if not decodes or not self._time.known:
            return self._ceiling
        once, token, pair = self._time.prefill_adds
        rest = self.room_s - self._time.decodes_s(decodes, decode_context) - once
        # A chunk attends to what is before it and to half of itself: twice, for its length is not known at first.
        chunk = float(self._ceiling)
        for _ in range(2):
            each = token + pair * (prefill_context + min(chunk, self._ceiling) / 2)
            chunk = rest / each if each > 0 else float(self._ceiling)
        if self._time.most_prefill:
            chunk = min(chunk, float(MOST_GROWTH * self._time.most_prefill))
        chunk = min(max(chunk, 0.0), float(self._ceiling))
        blocks = max(1, int(chunk) // self._block)
        return min(self._ceiling, max(decodes + blocks * self._block, decodes + 1))

    @property
    def reachable(self) -> bool | None:
        """Whether a step that decodes alone keeps to the target; None: not known yet."""
        if not self._time.known:
            return None
        return self._time.decodes_s(1, 0) <= self.target_s
