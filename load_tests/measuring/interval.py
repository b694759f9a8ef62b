"""How sure a ratio is: a paired bootstrap over interleaved rounds.

The two values of one round had the same machine, so rounds are drawn, never single values (Efron and Tibshirani, "An
Introduction to the Bootstrap", chapter 13: percentile intervals). Pure: the draws are seeded.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from load_tests.measuring.spread import number

LEVEL = 0.95
RESAMPLES = 2000
FEWEST = 6
"""Rounds. All of five fall on one side of 1 by chance once in sixteen times: no interval of 95 % can come of them."""

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Interval:
    """Of a ratio: where it lies with a probability of `LEVEL`. `pairs`: how many rounds it comes from."""

    low: float
    high: float
    pairs: int

    @property
    def is_shown(self) -> bool:
        """Whether there is a difference at all: 1 lies outside, and the rounds are enough to say so."""
        return self.pairs >= FEWEST and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        words = "" if self.is_shown else ", not shown"
        return f"{number(self.low, '.3f')} to {number(self.high, '.3f')}{words}"


def median_of_ratios(pairs: Pairs) -> float:
    """For rounds: each is one measurement of the ratio."""
    return statistics.median(mine / theirs for mine, theirs in pairs)


def ratio_of_means(pairs: Pairs) -> float:
    """For requests: a long one weighs more than a short one, as in what a user waits."""
    return sum(mine for mine, _ in pairs) / sum(theirs for _, theirs in pairs)


def paired_interval(
    mine: Sequence[float], theirs: Sequence[float], statistic: Callable[[Pairs], float] = median_of_ratios
) -> Interval:
    """Of `statistic` of `mine` to `theirs`, value by value. Raises ValueError for none, and for unequal numbers."""
    pairs = list(zip(mine, theirs, strict=True))
    if not pairs:
        raise ValueError("there are no rounds to draw from")
    rng = random.Random(0)
    found = sorted(statistic(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    beyond = round((1 - LEVEL) / 2 * RESAMPLES)
    return Interval(found[beyond], found[-1 - beyond], len(pairs))
