"""Arms take turns: whatever the machine does meanwhile, it does to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

Arm = TypeVar("Arm")


class Turn(NamedTuple, Generic[Arm]):
    """One arm's turn. `round` is below zero while rounds only warm up."""

    round: int
    arm: Arm

    @property
    def counts(self) -> bool:
        """Whether the round is one of those that are measured."""
        return self.round >= 0


def rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The arms in the order of round `number`: each is first once in as many rounds as there are arms."""
    shift = number % len(arms)
    return [*arms[shift:], *arms[:shift]]


def turns(arms: Sequence[Arm], rounds: int, warm_up: int = 0) -> Iterator[Turn[Arm]]:
    """Every arm once in each round; `warm_up` rounds come first and do not count."""
    for number in range(warm_up + rounds):
        for arm in rotated(arms, number):
            yield Turn(number - warm_up, arm)
