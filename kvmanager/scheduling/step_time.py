"""How long an engine step takes, measured while it runs, and at most how long (`StepEstimate`).

Decodes: ``a + c·requests + e·tokens before them``, from steps that only decode; a *decode* gets one token in the step.
A prefill adds ``f + b·tokens + d·attended pairs``, pairs of a computed token and one before it, from steps with one.

Two fits (`kvmanager.loading.changing_time`), so that a machine that becomes slower is noticed within a few steps, and a
single slow step is not taken for one. In a single fit the first long prompt looked like a machine ten times slower, the
next decode like one ten times faster, and prefills were never learned; thousands of decodes made it forget them, too.

What jobs are charged is in *units*, the time of one decoded token in a batch of the usual size. Units are decayed sums
of seconds over sums of tokens, and not taken from the fits: a fit's single coefficients jump by ten times from one step
to the next where steps are alike, and keys that were made of them would order nothing.

A step may stall for seconds, for no reason of its own: a page fault, a neighbour. A step that takes more than `STALL`
times what is expected is left out of everything, unless another one was so lately that it is no accident. So a machine
that stays slower is followed from its second step on. O(1) per step. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvmanager.loading.changing_time import ChangingTime

HALF_LIFE_SAMPLES, HALF_LIFE_S = 64.0, 120.0
ENOUGH = 8
"""Fewer samples say too little."""
EVERY_NTH_DECODE_STEP = 8
"""Steps that only decode are alike: one in this many is fitted, for a fit takes 0.1 ms."""
STALL, ALONE_STEPS = 2.5, 16
"""How slow a step is that may have stalled, and after how many steps of its kind another such step is one alone."""
FIRST_DECODE_S, FIRST_PREFILL_S = 0.01, 0.001
"""What a decoded token and a prefill token count while nothing is measured; only their ratio matters then."""
FORGET = 0.995
"""What a slowest step is worth after the next one of its work: half after 140."""
_DECODES_KEPT, _PREFILLS_KEPT = 0.999, 0.98
"""Of the sums for units, with each step of the kind: the last 1,000 steps that only decode, and 50 with a prefill."""


class _Rate:
    """Seconds a token: a decayed sum of seconds over one of tokens."""

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._seconds = self._tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._seconds = self._kept * self._seconds + seconds
        self._tokens = self._kept * self._tokens + tokens

    @property
    def each_s(self) -> float:
        """0 without a sample."""
        return self._seconds / self._tokens if self._tokens else 0.0


class _Stalls:
    """Tells the one step that stalled from a machine that has become slower, or a kind of step that is new."""

    def __init__(self) -> None:
        self._steps = ALONE_STEPS
        """Since the last slow one."""

    def is_alone(self, seconds: float, expected: float) -> bool:
        """Whether a step is slow and no other one was so lately. To be asked once about each."""
        self._steps += 1
        if seconds <= STALL * expected:
            return False
        alone = self._steps > ALONE_STEPS
        self._steps = 0
        return alone


@dataclass(frozen=True, slots=True)
class Step:
    """What a step computes: `decodes` requests by one token, `prefill` tokens, and what all of them `attend` to."""

    decodes: int = 0
    prefill: int = 0
    attended: int = 0
    decode_context: int = 0
    """What of `attended` the decodes do."""

    @property
    def tokens(self) -> int:
        """All that it computes."""
        return self.decodes + self.prefill

    def plus(self, tokens: int, context: int) -> Step:
        """With `tokens` of one more request, after `context` others."""
        attended = self.attended + tokens * context + tokens * (tokens + 1) // 2
        if tokens == 1:
            return Step(self.decodes + 1, self.prefill, attended, self.decode_context + context + 1)
        return Step(self.decodes, self.prefill + tokens, attended, self.decode_context)


class StepTime:
    """See the module's docstring."""

    def __init__(self) -> None:
        # What is named first is what all is put down to where all steps are alike.
        self._decode = ChangingTime(2, HALF_LIFE_SAMPLES, HALF_LIFE_S)
        self._prefill = ChangingTime(2, HALF_LIFE_SAMPLES, HALF_LIFE_S)
        self.most_prefill = 0
        """Tokens of the longest prefill that was measured: beyond it nothing is known."""
        self._decoded, self._prefilled = _Rate(_DECODES_KEPT), _Rate(_PREFILLS_KEPT)
        self._slow_decodes, self._slow_prefills = _Stalls(), _Stalls()
        self._unfitted = 0

    def took(self, step: Step, seconds: float, now: float) -> None:
        """A step has ended, at ``now`` on any clock that does not jump. What cannot be is ignored."""
        if not (step.decodes or step.prefill) or not 0 < seconds < inf:
            return
        fit, stalls = (self._prefill, self._slow_prefills) if step.prefill else (self._decode, self._slow_decodes)
        if fit.samples >= ENOUGH and stalls.is_alone(seconds, self.seconds(step)):
            return
        if step.prefill:
            self.most_prefill = max(self.most_prefill, step.prefill)
            attended = step.attended - step.decode_context
            besides = self.decodes_s(step.decodes, step.decode_context)
            self._prefill.add((step.prefill, attended), seconds, now, besides=besides)
            self._prefilled.add(step.prefill, max(0.0, seconds - besides))
            return
        self._decoded.add(step.decodes, seconds)
        self._unfitted += 1
        if self._decode.samples < ENOUGH or self._unfitted >= EVERY_NTH_DECODE_STEP:
            self._unfitted = 0
            self._decode.add((step.decodes, step.decode_context), seconds, now)

    @property
    def known(self) -> bool:
        """Whether there are samples enough."""
        return self._decode.samples + self._prefill.samples >= ENOUGH

    def seconds(self, step: Step) -> float:
        """How long a step takes, by the samples so far; 0 without any."""
        seconds = self.decodes_s(step.decodes, step.decode_context)
        if step.prefill:
            seconds += self._prefill.seconds(step.prefill, step.attended - step.decode_context)
        return seconds

    def decodes_s(self, requests: int, context: float) -> float:
        """Return the seconds for `requests` that decode after `context` tokens in all; 0 without any, or unmeasured."""
        return self._decode.seconds(requests, context) if requests else 0.0

    @property
    def prefill_adds(self) -> tuple[float, float, float]:
        """Seconds that a prefill adds: for being there, per token, per attended pair. Unmeasured: rather too many."""
        if not self._prefill.samples:
            return 0.0, self.prefill_s, 0.0
        once, token, pair = self._prefill.coefficients
        return once, token, pair

    @property
    def decode_s(self) -> float:
        """What one decoded token takes of the engine's time, in a batch of the usual size: the *unit*."""
        each_s = self._decoded.each_s
        return each_s if self.known and each_s > 0 else FIRST_DECODE_S

    @property
    def prefill_s(self) -> float:
        """What one prefill token takes, its share of what a prefill takes for being there included."""
        each_s = self._prefilled.each_s
        return each_s if self.known and each_s > 0 else FIRST_PREFILL_S * self.decode_s / FIRST_DECODE_S

    def units(self, prefill_tokens: float, decoded_tokens: float) -> float:
        """What computing these tokens costs, in decoded tokens."""
        return decoded_tokens + prefill_tokens * self.prefill_s / self.decode_s


class StepEstimate:
    """At most how long a step takes, undisturbed: what tells a step that is slow from one that hangs.

    A step's time is taken to be `a + b·tokens + c·attended` with constants that are not negative and not known. Then a
    step takes at most `seconds · max(1, tokens / measured tokens, attended / measured attended)` for whatever step was
    measured, a smaller one too; of all those bounds the least is expected.

    Of steps of about the same work (same powers of two) the slowest is kept, and forgotten slowly: O(1) per step, some
    hundred entries at most. Not thread-safe.
    """

    def __init__(self) -> None:
        self._slowest: dict[tuple[int, int], tuple[Step, float]] = {}

    def took(self, work: Step, seconds: float) -> None:
        """A step has ended. One that computed no token says nothing."""
        if work.tokens < 1:
            return
        size = (work.tokens.bit_length(), work.attended.bit_length())
        known = self._slowest.get(size)
        if known is None or seconds >= FORGET * known[1]:
            self._slowest[size] = work, seconds
        else:
            self._slowest[size] = known[0], FORGET * known[1]

    def expected_s(self, work: Step) -> float | None:
        """Seconds that a step of this work takes at most; None: nothing has been measured."""
        bounds = [
            seconds * max(1.0, work.tokens / known.tokens, work.attended / known.attended)
            for known, seconds in list(self._slowest.values())
        ]
        return min(bounds, default=None)
