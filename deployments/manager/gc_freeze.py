"""Keeps Python's garbage collector away from the index.

A full collection visits every object: with a million segments that is a second in which nobody gets a plan. The index
needs none: a segment that is forgotten is unlinked, and freed by its last reference. So what has been built is set
aside (`gc.freeze`) whenever the index has grown by `GROWTH` segments, and collections see only what is younger.

What is garbage at that moment and hangs together in a cycle is never freed; a collection of the young before it and the
few freezes of an index's life keep that small.
"""

from __future__ import annotations

import gc

GROWTH = 20_000


class GcFreeze:
    """Of one process, whose index is nearly all that it holds."""

    def __init__(self) -> None:
        self._most = 0

    def set_aside(self, segments: int) -> bool:
        """To be called every second or so with the size of the index; whether it was set aside now."""
        if segments < self._most + GROWTH:
            return False
        self._most = segments
        gc.collect(1)
        gc.freeze()
        return True
