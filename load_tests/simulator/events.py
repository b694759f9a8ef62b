"""A replay's clock: calls by the time at which they are due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Events:
    """Calls to come. Of one time, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._ids = itertools.count()

    def at(self, when: float, call: Callable[[float], None]) -> None:
        """Have `call` called with the time, in seconds."""
        heapq.heappush(self._due, (when, next(self._ids), call))

    def run_until(self, when: float = float("inf")) -> None:
        """Call what is due until then, and what those calls ask for; without a time, until nothing is left."""
        while self._due and self._due[0][0] <= when:
            then, _, call = heapq.heappop(self._due)
            call(then)
