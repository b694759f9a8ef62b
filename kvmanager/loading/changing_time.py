"""How long something takes, as a sum of amounts times rates, measured while the rates change.

``seconds = c[0] + c[1] * amounts[0] + c[2] * amounts[1] + ...``, no coefficient below zero.

Weighted least squares over the samples so far, by their relative errors, so that short ones count as much as long ones.
A sample fades with the samples after it and with time; what is left of all of them together never counts less than one
sample, so the last known shape survives a quiet night. A further coefficient must earn its place (Akaike's criterion):
with samples of one size all is put down to the first amount.

A link or a processor may become ten times slower from one sample to the next, for which fading is too slow, and a
single sample may be ten times too long for no reason, which must not count ten times. Both are told apart by the
cumulated sum of the deviations' logarithms (E. S. Page, Continuous Inspection Schemes, Biometrika 41, 1954): one sample
of five times the expected time is a change, or two of three times, or four of two times. After a change the known shape
is kept, scaled by it, and counts as one sample. What deviates without being a change counts as twice the expected time
at most, or half of it.

O(1) per sample. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf, log2, sqrt

TOLERATED = 0.35
"""Binary logarithm of a deviation that is noise: a factor of 1.27."""
CHANGED = 1.75
"""Cumulated deviations, less what is tolerated of each, that are a change."""
MOST_DEVIATION = 2.0
"""A sample deviates by this factor at most, unless it is a change."""
LEAST_WEIGHT = 1.0
"""What all earlier samples count together at least, in samples."""
_WORTH_A_TERM = 4.0
_SINGULAR = 1e-9
_LEAST_S, _MOST_S = 1e-6, 1e6


class ChangingTime:
    """See the module's docstring."""

    def __init__(self, amounts: int, half_life_samples: float, half_life_s: float) -> None:
        """Take the number of amounts, and after how many samples and seconds a sample counts half."""
        size = amounts + 1
        self._half_life_samples = half_life_samples
        self._half_life_s = half_life_s
        self._products = [[0.0] * size for _ in range(size)]
        self._moments = [0.0] * size
        self._square = 0.0
        self._weight = 0.0
        self._slower = self._faster = 0.0
        # Which coefficients may be above zero, the likeliest explanation first: the first amount alone.
        numbers = [*range(1, size), 0]
        self._supports = [tuple(sorted(s)) for n in range(1, size + 1) for s in combinations(numbers, n)]
        self.samples = 0
        self.last_at = -inf
        """When the last sample came."""
        self.coefficients: tuple[float, ...] = (0.0,) * size

    def seconds(self, *amounts: float) -> float:
        """Return how long these amounts take, by the samples so far; 0 without any."""
        constant, *rates = self.coefficients
        return constant + sum(rate * amount for rate, amount in zip(rates, amounts, strict=True))

    def add(
        self, amounts: Sequence[float], seconds: float, now: float, changed: bool = False, besides: float = 0.0
    ) -> None:
        """Note that ``amounts`` took ``seconds``, at time ``now`` on any clock that does not jump.

        ``changed``: this is a change, whatever came before. ``besides``: the part of ``seconds`` that has another
        cause; errors and changes are those of the whole.
        """
        seconds = min(max(seconds, _LEAST_S), _MOST_S)
        expected = besides + self.seconds(*amounts) if self.samples else 0.0
        self._fade(now)
        if expected > _LEAST_S:
            if self._has_changed(seconds / expected) or changed:
                self._rescale(seconds - besides, expected - besides)
                expected = seconds
            seconds = min(max(seconds, expected / MOST_DEVIATION), expected * MOST_DEVIATION)
        else:
            expected = seconds
        weight = 1.0 / expected**2
        seconds -= besides
        row = (1.0, *amounts)
        for i, left in enumerate(row):
            self._moments[i] += weight * left * seconds
            for j, right in enumerate(row):
                self._products[i][j] += weight * left * right
        self._square += weight * seconds * seconds
        self._weight += 1.0
        self.samples += 1
        self.last_at = now
        self.coefficients = self._fit()

    def _fade(self, now: float) -> None:
        if not self.samples:
            return
        passed_s = max(0.0, now - self.last_at)
        keep = 0.5 ** (1.0 / self._half_life_samples + passed_s / self._half_life_s)
        self._scale(max(keep, min(1.0, LEAST_WEIGHT / self._weight)))

    def _has_changed(self, ratio: float) -> bool:
        deviation = log2(ratio)
        self._slower = max(0.0, self._slower + deviation - TOLERATED)
        self._faster = max(0.0, self._faster - deviation - TOLERATED)
        if max(self._slower, self._faster) < CHANGED:
            return False
        self._slower = self._faster = 0.0
        return True

    def _rescale(self, seconds: float, expected: float) -> None:
        """Let all earlier samples have taken ``seconds / expected`` times as long, and count as one."""
        self._scale(min(1.0, LEAST_WEIGHT / self._weight))
        if min(seconds, expected) <= _LEAST_S:
            return
        ratio = seconds / expected
        for i in range(len(self._moments)):
            self._moments[i] /= ratio  # times `ratio`, and weights are by relative error: over its square
            for j in range(len(self._moments)):
                self._products[i][j] /= ratio * ratio

    def _scale(self, keep: float) -> None:
        self._weight *= keep
        self._square *= keep
        for i in range(len(self._moments)):
            self._moments[i] *= keep
            for j in range(len(self._moments)):
                self._products[i][j] *= keep

    def _fit(self) -> tuple[float, ...]:
        """Least squares without negative coefficients: every choice of those above zero, as there are seven at most."""
        best: tuple[float, ...] = (0.0,) * len(self._moments)
        error = inf
        for support in self._supports:
            found = self._solve(support)
            if found is None or min(found) < 0:
                continue
            left = max(0.0, self._square - sum(c * self._moments[i] for c, i in zip(found, support, strict=True)))
            if error - left > _WORTH_A_TERM * left / self._weight + _SINGULAR * self._square:
                error = left
                named = dict(zip(support, found, strict=True))
                best = tuple(named.get(i, 0.0) for i in range(len(self._moments)))
        return best

    def _solve(self, support: tuple[int, ...]) -> list[float] | None:
        """Normal equations of some coefficients, by elimination; None where the samples do not tell them apart."""
        norms = [sqrt(self._products[i][i]) for i in support]
        if not all(norms):
            return None
        rows = [
            [self._products[i][j] / (a * b) for j, b in zip(support, norms, strict=True)] + [self._moments[i] / a]
            for i, a in zip(support, norms, strict=True)
        ]
        for at, row in enumerate(rows):  # symmetric and positive: no pivoting
            if row[at] < _SINGULAR:
                return None
            for below in rows[at + 1 :]:
                factor = below[at] / row[at]
                below[at:] = [value - factor * above for value, above in zip(below[at:], row[at:], strict=True)]
        found = [0.0] * len(rows)
        for at in reversed(range(len(rows))):
            known = sum(rows[at][j] * found[j] for j in range(at + 1, len(rows)))
            found[at] = (rows[at][-1] - known) / rows[at][at]
        return [value / norm for value, norm in zip(found, norms, strict=True)]
