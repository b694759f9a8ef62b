"""A circuit breaker: stop calling a service that does not answer, and try again with one call at a time.

States (Nygard, *Release It!*, chapter 5):

=========  ===========================================  ========================================================
state      calls allowed                                leaves it
=========  ===========================================  ========================================================
closed     all                                          after ``failures_to_open`` failures in a row: open
open       none                                         after ``open_s``, with the next call: half-open
half-open  the one that ended the open state            its success: closed; its failure: open, for twice as long
=========  ===========================================  ========================================================

An answer that arrives while the circuit is open was asked for before and changes nothing. A probe whose caller does not
wait for its end (its client has gone) is given up by `abandoned`, and the next caller probes at once. One that never
reports, because its caller died, counts as lost after ``longest_open_s``. Not thread-safe: callers that share a breaker
hold a lock around each call. No clock: ``now`` is seconds on any clock that does not go backwards.
"""

from enum import StrEnum


class CircuitState(StrEnum):
    """See the table above."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class CircuitBreaker:
    """Guards the calls to one peer: `allows` before each, then `succeeded`, `failed` or `abandoned`.

    Raises ValueError for limits that cannot work.
    """

    def __init__(self, failures_to_open: int = 3, open_s: float = 1.0, longest_open_s: float = 30.0) -> None:
        if failures_to_open < 1:
            raise ValueError(f"failures_to_open must be at least 1, got {failures_to_open}")
        if not 0 < open_s <= longest_open_s:
            raise ValueError(f"0 < open_s <= longest_open_s must hold, got {open_s} and {longest_open_s}")
        self.state = CircuitState.CLOSED
        self.opened = 0
        """How many times it opened, failed probes included."""
        self._failures_to_open = failures_to_open
        self._first_open_s = open_s
        self._longest_open_s = longest_open_s
        self._failures = 0
        self._open_s = open_s
        self._wait_until = 0.0
        """When open: the first probe. When half-open: the probe is lost."""

    def allows(self, now: float) -> bool:
        """Return whether a call may be made now. True obliges the caller to report its outcome."""
        if self.state is CircuitState.CLOSED:
            return True
        if now < self._wait_until:
            return False
        self.state = CircuitState.HALF_OPEN
        self._wait_until = now + self._longest_open_s
        return True

    def succeeded(self) -> None:
        """Report that a call was answered."""
        if self.state is CircuitState.OPEN:
            return
        self.state = CircuitState.CLOSED
        self._failures = 0
        self._open_s = self._first_open_s

    def failed(self, now: float) -> None:
        """Report that a call failed or was not answered in time."""
        if self.state is CircuitState.OPEN:
            return
        if self.state is CircuitState.HALF_OPEN:
            self._open_s = min(2 * self._open_s, self._longest_open_s)
        else:
            self._failures += 1
            if self._failures < self._failures_to_open:
                return
        self.state = CircuitState.OPEN
        self.opened += 1
        self._wait_until = now + self._open_s

    def abandoned(self) -> None:
        """Report that a call's outcome will never be known."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.OPEN
            self._wait_until = float("-inf")
