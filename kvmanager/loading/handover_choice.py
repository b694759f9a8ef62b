"""Whether to prefill a prompt on one replica and decode it on another: only where that pays, by measured times.

A hand-over spares the decode replica's other requests the prompt's prefill, and costs this one a gap between its first
two tokens: the save's end, one more hop, the load. So it pays where computing what the decode replica lacks of the
prompt would take longer than that gap. Both are measured: the prefill by its engine, the gap by the caller that hands
over. What does not pay now may pay later, so one prompt of `PROBE_EVERY` is handed over all the same. One thread.
"""

from __future__ import annotations

from kvmanager.loading.changing_time import ChangingTime

HALF_LIFE_SAMPLES = 64.0
HALF_LIFE_S = 600.0
LEAST_SAMPLES = 4
"""Of each kind, before the measured break-even counts; `least_tokens` alone decides until then."""
PROBE_EVERY = 32


class HandoverChoice:
    """See the module's docstring."""

    def __init__(self, least_tokens: int, measures: bool = True) -> None:
        """``least_tokens``: fewer uncached ones are never handed over; not ``measures``: as many always are."""
        self._measures = measures
        self._least_tokens = least_tokens
        self._prefill = ChangingTime(1, HALF_LIFE_SAMPLES, HALF_LIFE_S)
        self._gap = ChangingTime(1, HALF_LIFE_SAMPLES, HALF_LIFE_S)
        self._declined = 0

    def prefilled(self, now: float, tokens: int, seconds: float) -> None:
        """Note that a prefill replica has computed ``tokens`` in ``seconds``."""
        if tokens > 0 and seconds > 0:
            self._prefill.add([float(tokens)], seconds, now)

    def handed_over(self, now: float, prompt_tokens: int, seconds: float) -> None:
        """Note that a prompt's second token came ``seconds`` after its first."""
        if seconds > 0:
            self._gap.add([float(prompt_tokens)], seconds, now)

    def break_even_tokens(self, prompt_tokens: int) -> int:
        """From how many uncached tokens on a prompt of this length is handed over."""
        prefill_s = self._prefill.coefficients[1]
        if not self._measures or min(self._prefill.samples, self._gap.samples) < LEAST_SAMPLES or prefill_s <= 0:
            return self._least_tokens
        gap_s = self._gap.seconds(float(prompt_tokens)) - self._prefill.coefficients[0]
        return max(self._least_tokens, int(gap_s / prefill_s))

    def pays(self, uncached_tokens: int, prompt_tokens: int) -> bool:
        """Return whether to hand over a prompt of which the best decode replica lacks ``uncached_tokens``."""
        if uncached_tokens < self._least_tokens:
            return False
        if uncached_tokens >= self.break_even_tokens(prompt_tokens):
            return True
        self._declined += 1
        return self._declined % PROBE_EVERY == 0
