"""How many replicas there should be now, where their number changes by itself: those below it are missing.

One that is still being started for more load is not missing, and one that is taken away is not either. One that was
there and is gone is missing until it has been replaced, also where fewer would be enough. Fewer than the least
allowed number are always too few. One thread.
"""

from __future__ import annotations

LAG_S = 10.0
"""How long a replica's start or removal may be seen in one place before it is known in all, where cores are short."""


class WantedReplicas:
    """See the module's docstring. `least`: the least number allowed. Times are seconds of a clock that never jumps."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._reached = 0
        self._short_since: float | None = None

    def now(self, at: float, target: int | None, living: int, listed: int) -> int:
        """How many there should be.

        `target`: how many Serve aims at, None: it has not said lately; `living`: those that can be sent to; `listed`:
        those that Serve runs, as it said last, dead ones among them that it has not noticed yet.
        """
        aim = listed if target is None else target
        self._reached = min(aim, max(self._reached, living, listed))
        if living >= self._reached:
            self._short_since = None
            return self._least
        if self._short_since is None:
            self._short_since = at
        return max(self._least, self._reached) if at - self._short_since >= LAG_S else self._least
