"""What the scheduler tells of preemptions, and asks before one: whatever keeps the KV of preempted requests answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from deployments.engine.tracked_request import TrackedRequest


class PreemptionHooks(Protocol):
    """On the engine thread, while a step is planned."""

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of a preempted request are about to be free: no other preemption is needed."""
        ...

    def before(self, tracked: TrackedRequest) -> None:
        """Hear that a running request is about to lose its blocks."""
        ...

    def ahead(self, tracked: TrackedRequest) -> None:
        """Hear that a preempted request is among the next to run."""
        ...

    def holds_back(self, tracked: TrackedRequest) -> bool:
        """Return whether a waiting request could not run now, if it were its turn."""
        ...
