"""How long an engine step takes, measured while it runs: ``a + c·decodes + b·prefill tokens + d·attended pairs``.

A *decode* is a request that gets one token in the step. *Attended pairs* are the pairs of a computed token and one
before it, of prefills and decodes alike. The fit is `kvmanager.loading.changing_time`, so a machine that becomes slower
is noticed within a few steps, and a single slow step is not taken for one.

What jobs are charged is made of it: a *unit* is the time of one decoded token in a batch of the usual size. O(1) per
step. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvmanager.loading.changing_time import ChangingTime

HALF_LIFE_SAMPLES, HALF_LIFE_S = 64.0, 120.0
ENOUGH = 8
"""Fewer samples say too little."""
EVERY_NTH_DECODE_STEP = 8
"""Steps that only decode are alike: one in so many is fitted, for a fit takes 0.1 ms."""
FIRST_DECODE_S, FIRST_PREFILL_S = 0.01, 0.001
"""What a decoded token and a prefill token count while nothing is measured; only their ratio matters then."""
_BATCH_KEPT = 0.95


@dataclass(frozen=True, slots=True)
class Step:
    """What a step computes: `decodes` requests by one token, `prefill` tokens, and what all of them `attend` to."""

    decodes: int = 0
    prefill: int = 0
    attended: int = 0

    def plus(self, tokens: int, context: int) -> Step:
        """With `tokens` of one more request, after `context` others."""
        attended = self.attended + tokens * context + tokens * (tokens + 1) // 2
        if tokens == 1:
            return Step(self.decodes + 1, self.prefill, attended)
        return Step(self.decodes, self.prefill + tokens, attended)


class StepTime:
    """See the module's docstring."""

    def __init__(self) -> None:
        # Prefill comes first: where all steps are alike the fit puts all down to it.
        self._time = ChangingTime(3, HALF_LIFE_SAMPLES, HALF_LIFE_S)
        self._batch = 1.0
        self._unfitted = 0

    def took(self, step: Step, seconds: float, now: float) -> None:
        """A step has ended, at ``now`` on any clock that does not jump. What cannot be is ignored."""
        if not (step.decodes or step.prefill) or not 0 < seconds < inf:
            return
        if step.decodes:
            self._batch += (1.0 - _BATCH_KEPT) * (step.decodes - self._batch)
        if not step.prefill and self._time.samples >= ENOUGH:
            self._unfitted += 1
            if self._unfitted < EVERY_NTH_DECODE_STEP:
                return
        if not step.prefill:
            self._unfitted = 0
        self._time.add((step.prefill, step.decodes, step.attended), seconds, now)

    @property
    def known(self) -> bool:
        """Whether there are samples enough."""
        return self._time.samples >= ENOUGH

    def seconds(self, step: Step) -> float:
        """How long a step takes, by the samples so far; 0 without any."""
        return self._time.seconds(step.prefill, step.decodes, step.attended)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds per step, per decode, per prefill token, per attended pair; zeros without a sample."""
        once, prefill, decode, pair = self._time.coefficients
        return once, decode, prefill, pair

    @property
    def decode_s(self) -> float:
        """What one decoded token takes of the engine's time, in a batch of the usual size: the *unit*."""
        once, decode, _, _ = self.coefficients
        seconds = (once + decode * self._batch) / max(1.0, self._batch)
        return seconds if self.known and seconds > 0 else FIRST_DECODE_S

    @property
    def prefill_s(self) -> float:
        """What one prefill token takes."""
        prefill = self.coefficients[2]
        return prefill if self.known and prefill > 0 else FIRST_PREFILL_S * self.decode_s / FIRST_DECODE_S

    def units(self, prefill_tokens: float, decoded_tokens: float) -> float:
        """What computing these tokens costs, in decoded tokens."""
        return decoded_tokens + prefill_tokens * self.prefill_s / self.decode_s
