"""A token bucket: so much per minute on average, and up to a minute's worth at once.

It may fall below zero: what an answer costs is known at its end only. Who is in debt takes nothing until it is paid,
so the average holds. Every method is given the time, in seconds on a clock that does not jump; a step backwards is
ignored. O(1). Pure; not thread-safe.
"""

from __future__ import annotations

MINUTE_S = 60.0


class TokenBucket:
    """`per_minute` > 0; full at first."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: float, now: float) -> bool:
        """Take `amount`; False, and nothing is taken, when there is less."""
        self._fill(now)
        if self._level < amount:
            return False
        self._level -= amount
        return True

    def correct(self, amount: float, now: float) -> None:
        """Take `amount` whatever there is (less than 0: give it back, up to a full bucket)."""
        self._fill(now)
        self._level = min(float(self.per_minute), self._level - amount)

    def remaining(self, now: float) -> int:
        """What could be taken now."""
        self._fill(now)
        return max(0, int(self._level))

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken if nobody else takes any; infinite when it never can."""
        self._fill(now)
        if amount > self.per_minute:
            return float("inf")
        return max(0.0, amount - self._level) * MINUTE_S / self.per_minute

    def full_in_s(self, now: float) -> float:
        """Seconds until the bucket is full again."""
        return self.wait_s(float(self.per_minute), now)

    def _fill(self, now: float) -> None:
        if now > self._at:
            gained = (now - self._at) * self.per_minute / MINUTE_S
            self._level = min(float(self.per_minute), self._level + gained)
            self._at = now
