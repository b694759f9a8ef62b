"""A process's memory: what the garbage collector need not look at, and what goes back to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
from collections.abc import Callable, Iterator

GROWTH = 20_000
EVERY_S = 60.0


class GcFreeze:
    """Keeps Python's garbage collector away from an index or its mirror, of a process that holds little else.

    A full collection visits every object: with a million segments that is a second in which the process answers
    nothing. An index needs none: a segment that is forgotten is unlinked, and freed by its last reference. So what has
    been built is set aside (`gc.freeze`) whenever the index has grown by `GROWTH` segments, and collections see only
    what is younger.

    What is garbage at that moment and hangs together in a cycle is never freed; a collection of the young before it and
    the few freezes of an index's life keep that small.
    """

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


def glibc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None with another C library, which has none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


@functools.cache
def keep_giving_back(every_s: float = EVERY_S) -> threading.Event:
    """Give free memory back to the operating system: trim the heap every `every_s` seconds; the event ends that.

    A process that computes or serves for hours asks for blocks of all sizes. glibc keeps what is freed for the next
    one, in an arena for each thread, and what lies between two blocks in use is not returned by itself. So an engine
    that computes prompts of different lengths grows with nothing more in use, and so does a process that is told of
    them. While a heap is trimmed the allocations of other threads wait: some milliseconds, which is why it is done once
    a minute. On one thread of its own.
    """
    over, trim = threading.Event(), glibc_trim()

    def work() -> None:
        while trim is not None and not over.wait(every_s):
            trim(0)

    threading.Thread(target=work, name="crosskv-free-memory", daemon=True).start()
    return over
