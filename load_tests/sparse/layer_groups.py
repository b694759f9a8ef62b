"""Which layers may lose tokens: 25 % kept in one third of them, in one layer, or in half of them, all else whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvmanager.extensions.sparse.budgets import EIGHTHS, Budgets
from load_tests.sparse.calibrate import ALONE
from load_tests.sparse.judge import Cost

THIRDS = ("shallow third", "middle third", "deep third")


def layer_groups(layers: int) -> Iterator[tuple[str, list[int]]]:
    """Names and layers: the thirds, then each layer by itself."""
    for name, part in zip(THIRDS, np.array_split(np.arange(layers), len(THIRDS)), strict=True):
        if len(part):
            yield name, part.tolist()
    for layer in range(layers):
        yield f"layer {layer}", [layer]


def group_rows(layers: int, measure: Callable[[Budgets], Cost]) -> list[dict[str, Any]]:
    """What each group loses when it alone keeps 25 % of its tokens."""
    return [
        {"group": name, "layers": " ".join(map(str, group))} | measure(lowered(layers, group)).as_row()
        for name, group in layer_groups(layers)
    ]


def lowered(layers: int, group: Sequence[int]) -> Budgets:
    """Budgets that keep all of every other layer."""
    return Budgets.of_eighths([ALONE if layer in group else EIGHTHS for layer in range(layers)])
