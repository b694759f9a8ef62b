"""Arms take turns: whatever the machine does meanwhile, it does to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Arm = TypeVar("Arm")


def rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The arms in the order of round `number`: each is first once in as many rounds as there are arms."""
    shift = number % len(arms)
    return [*arms[shift:], *arms[:shift]]


def turns(arms: Sequence[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """Each round's number with every arm once."""
    return ((number, arm) for number in range(rounds) for arm in rotated(arms, number))
