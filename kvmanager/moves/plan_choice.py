"""What decides for one prompt how much of what is stored is loaded (`kvmanager.loading.load_choice` by rates)."""

from collections.abc import Sequence
from typing import Protocol

from kvmanager.moves.plan import NOTHING_EXPECTED, PlanExpectation, PlannedLoad, PlanReason


class PlanChoice(Protocol):
    """Decides for one prompt how much of what is stored is loaded. Each method is called once, in this order."""

    device_tokens: int
    """Leading tokens that the device holds now."""

    def choose(self, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """Return how many of the stored segments that begin a prompt to load, from the first on, and why."""
        ...

    def expectation(self) -> PlanExpectation:
        """Return what is expected of the prompt with what was chosen."""
        ...


class AllStored:
    """The choice of all that is stored."""

    device_tokens = 0

    def choose(self, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """Return all."""
        return len(segments), PlanReason.HIT

    def expectation(self) -> PlanExpectation:
        """Return that nothing is known."""
        return NOTHING_EXPECTED
