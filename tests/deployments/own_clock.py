"""A clock that stands still until a test lets time pass: put in the place of a module's `time`."""

from __future__ import annotations


class OwnClock:
    """As much of the module `time` as waits with a deadline need. Any thread may ask."""

    def __init__(self) -> None:
        self._now = 1_000.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass at once."""
        self._now += seconds
