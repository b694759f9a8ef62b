"""Keeps Python's garbage collector away from what stays: modules, and the index or its mirror.

A full collection visits every object: with a million segments that is a second in which the process answers nothing.
An index needs none: a segment that is forgotten is unlinked, and freed by its last reference. So what has been built is
set aside (`gc.freeze`) whenever the index has grown by `GROWTH` segments, and collections see only what is younger.

What is garbage at that moment and hangs together in a cycle is never freed; a collection of the young before it and the
few freezes of an index's life keep that small.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

GROWTH = 20_000


class GcFreeze:
    """Of one process, whose index is nearly all that it holds."""

    def __init__(self) -> None:
        self._aside = 0
        """The index's size at the last freeze, or less where it has shrunk since: what takes that place is young."""

    def set_aside(self, segments: int) -> bool:
        """To be called every second or so with the size of the index; whether it was set aside now."""
        self._aside = min(self._aside, segments)
        if segments < self._aside + GROWTH:
            return False
        self._aside = segments
        gc.collect(1)
        gc.freeze()
        return True


@contextlib.contextmanager
def modules_set_aside() -> Iterator[None]:
    """Import large libraries meanwhile: nothing of them is garbage, now or later.

    Looking for it takes a third of vLLM's import. No other thread of the process may need its garbage collected.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
