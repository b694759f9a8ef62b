"""Budgets by layer: each layer is lowered alone, and then all within a bound on KL, the harmless ones first.

CacheGen's third insight (layers differ in what they may lose) carried over to dropped tokens, but measured layer by
layer instead of by thirds: on the demo model the first layer may lose most, and the next two nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmanager.extensions.sparse.budgets import EIGHTHS, Budgets
from load_tests.sparse.judge import Cost

MOST_KL = 0.002
"""Nats, the mean over all judged tokens."""
ALONE = 2
"""Eighths of the one layer that is lowered alone: 25 %."""
STEPS = (1, 2, 3, 4, 6)
"""Eighths to try, the least first; what none of them suits is kept whole."""

QUESTIONS_PER_LOST = 180
"""Questions for each answer that may be lost: one that hangs on a tie goes either way whatever is done to KV."""

Measure = Callable[[Budgets], Cost]


@dataclass(frozen=True)
class Calibrated:
    """The budgets, what they cost on the prompts that they were chosen on, and each layer's cost alone."""

    budgets: Budgets
    cost: Cost
    alone: list[Cost]


def calibrate(
    layers: int, measure: Measure, most_kl: float = MOST_KL, tick: Callable[[], None] = lambda: None
) -> Calibrated:
    """The smallest budgets that this greedy search finds; `fits` says what they may cost."""
    alone = []
    for layer in range(layers):
        alone.append(measure(Budgets.of_eighths(_with([EIGHTHS] * layers, layer, ALONE))))
        tick()
    eighths = [EIGHTHS] * layers
    cost = measure(Budgets.of_eighths(eighths))
    for layer in sorted(range(layers), key=lambda number: (alone[number].kl, number)):
        for step in STEPS:
            found = measure(Budgets.of_eighths(_with(eighths, layer, step)))
            if fits(found, most_kl):
                eighths, cost = _with(eighths, layer, step), found
                break
        tick()
    return Calibrated(Budgets.of_eighths(eighths), cost, alone)


def fits(cost: Cost, most_kl: float) -> bool:
    """Whether nothing measurable is lost: little KL, and hardly more answers than are gained."""
    return cost.kl <= most_kl and (cost.lost - cost.gained) * QUESTIONS_PER_LOST <= cost.questions


def _with(eighths: Sequence[int], layer: int, number: int) -> list[int]:
    return [number if at == layer else old for at, old in enumerate(eighths)]
