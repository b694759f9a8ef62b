"""Plan that turns one K or V into symbols at one level: the step, the escape limit, the frequencies.

A plan is derived from a histogram of values in units of their channel's standard deviation. A value is divided by the
step and rounded; what falls beyond ``limit`` steps escapes: its symbol is one of the two outermost, and the value
itself goes into the section as it is. The limit is where an escape's bits and a symbol's slot in the table cost the
same. Clamping gives the same KL on the demo model, whose values are tame; escapes are for models whose first tokens
lie far outside.

A symbol stands for the middle of its interval. The mean of the values in it has the smaller error, but it is nearer to
zero: all keys shrink, and with them what attention tells tokens apart by. On the demo model that is ten times the KL.
"""

from dataclasses import dataclass
from math import erf, sqrt
from typing import Any

import numpy as np

from kernels.entropy.rans import SymbolTable

Array = np.ndarray[Any, Any]

BINS_PER_DEVIATION = 64
REACH = 64
"""A histogram covers -64 to 64 standard deviations; what lies beyond counts at its ends, and escapes."""
FACTOR_UNIT = 1 / 16
"""Step factors are multiples of this, so that the edges of their intervals are edges of bins."""
MAX_FACTOR = 8.0
MAX_LIMIT = 127
ESCAPE_BITS = 16

_EDGES = (np.arange(2 * REACH * BINS_PER_DEVIATION + 1) - REACH * BINS_PER_DEVIATION) / BINS_PER_DEVIATION
_MIDDLES = (_EDGES[:-1] + _EDGES[1:]) / 2


@dataclass(frozen=True, eq=False)
class StepPlan:
    """See the module. Immutable. Raises ValueError for parts that do not belong together."""

    factor: float
    """The step in units of a channel's standard deviation."""
    table: SymbolTable
    """Of the symbols 0 .. 2 * limit; the first and the last are escapes."""

    def __post_init__(self) -> None:
        if not FACTOR_UNIT <= self.factor <= MAX_FACTOR or self.factor % FACTOR_UNIT:
            raise ValueError(f"a step factor is a multiple of {FACTOR_UNIT} up to {MAX_FACTOR}, got {self.factor}")
        symbols = len(self.table.frequencies)
        if symbols % 2 == 0 or not 1 <= self.limit <= MAX_LIMIT or not self.table.frequencies.all():
            raise ValueError(f"a step plan codes every one of 3, 5, ... 255 symbols, got {symbols}")

    @property
    def limit(self) -> int:
        """Steps from zero to the escapes."""
        return len(self.table.frequencies) // 2


def histogram(values: Array) -> Array:
    """float64 counts ``(2 * REACH * BINS_PER_DEVIATION,)`` of values in units of their channel's deviation."""
    within = np.clip(np.nan_to_num(values.reshape(-1)), -REACH, REACH)
    numbers = np.floor(within * BINS_PER_DEVIATION).astype(np.int64) + REACH * BINS_PER_DEVIATION
    numbers = np.minimum(numbers, len(_MIDDLES) - 1)
    return np.bincount(numbers, minlength=len(_MIDDLES)).astype(np.float64)


def normal_histogram() -> Array:
    """What `histogram` would count of a normal distribution; the total is 2**32."""
    below = np.array([0.5 * (1 + erf(edge / sqrt(2))) for edge in _EDGES])
    return np.diff(below) * 2.0**32


def entropy_and_error(counts: Array, factor: float) -> tuple[float, float]:
    """Of values of this histogram in such steps: bits per value without any table's cost, and the mean squared error.

    The error is in squares of a channel's deviation, as the factor is in deviations.
    """
    share = counts / counts.sum()
    steps = np.rint(_MIDDLES / factor)
    of_step = np.bincount((steps - steps[0]).astype(np.int64), weights=share)
    of_step = of_step[of_step > 0]
    within_bins = 1 / (12 * BINS_PER_DEVIATION**2)
    error = share @ (_MIDDLES - steps * factor) ** 2 + within_bins
    return float(-(of_step @ np.log2(of_step))), float(error)


def plan_for(counts: Array, factor: float) -> tuple[StepPlan, float]:
    """The plan of least bits for values of this histogram and this step, and those bits per value, escapes included."""
    steps = np.rint(_MIDDLES / factor)
    most = min(MAX_LIMIT, int(REACH / factor))
    of_step = np.bincount((np.clip(steps, -most, most) + most).astype(np.int64), weights=counts, minlength=2 * most + 1)
    best: tuple[StepPlan, float] | None = None
    for limit in range(1, most + 1):
        inner = of_step[most - limit + 1 : most + limit]
        low, high = of_step[: most - limit + 1].sum(), of_step[most + limit :].sum()
        of_symbol = np.array([low, *inner, high])
        table = SymbolTable.from_counts(of_symbol)
        bits = (table.entropy_bits(of_symbol) + ESCAPE_BITS * (low + high)) / counts.sum()
        if best is None or bits < best[1]:
            best = StepPlan(factor, table), bits
        elif low + high == 0:
            break
    assert best is not None
    return best
