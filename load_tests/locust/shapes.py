"""How many users at which part of a run: each shape takes the most users, and the share of the run that has passed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

ShapeName = Literal["steady", "staircase", "spike"]

STEPS = 5
SPIKE_BEGINS, SPIKE_ENDS, SPIKE_BASE = 0.4, 0.6, 0.2
"""The spike lies between these shares of the run; outside of it is this share of the users."""


def steady(users: int, share: float) -> int:
    """All of them, all the time."""
    return users


def staircase(users: int, share: float) -> int:
    """`STEPS` steps of equal length and height, up to all users."""
    return math.ceil(users * (math.floor(share * STEPS) + 1) / STEPS)


def spike(users: int, share: float) -> int:
    """Few users, all at once, few again."""
    return users if SPIKE_BEGINS <= share < SPIKE_ENDS else math.ceil(SPIKE_BASE * users)


SHAPES: dict[ShapeName, Callable[[int, float], int]] = {"steady": steady, "staircase": staircase, "spike": spike}
