"""What speculation knows of one replica: what is wanted and pinned there, and what may be moved there."""

from kvmanager.wanted_set import PinCounts, WantedSet


class Desk:
    """See the module. One thread."""

    __slots__ = ("_credit_at", "credit_bytes", "paused_until", "pins", "refusals", "wanted")

    def __init__(self, advantage: float) -> None:
        """``advantage``: see `WantedSet`."""
        self.wanted = WantedSet(advantage)
        self.pins = PinCounts()
        self.credit_bytes = 0.0
        """What may be promoted now; below zero after a large one."""
        self._credit_at = 0.0
        self.paused_until = float("-inf")
        """No promotions until then: there is no room for them."""
        self.refusals = 0
        """For want of room, since a promotion was last done."""

    def earn(self, now: float, bytes_per_s: float, most_s: float) -> None:
        """Let credit grow with time, up to that of ``most_s`` seconds."""
        grown = self.credit_bytes + (now - self._credit_at) * bytes_per_s
        self.credit_bytes, self._credit_at = min(most_s * bytes_per_s, grown), now
