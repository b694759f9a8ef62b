"""Gives memory that is free back to the operating system.

A process that computes or serves for hours asks for blocks of all sizes. glibc keeps what is freed for the next one, in
an arena for each thread, and what lies between two blocks in use is not returned by itself. So an engine that computes
prompts of different lengths grows with nothing more in use, and so does a process that is told of them. While a heap is
trimmed the allocations of other threads wait: some milliseconds, which is why it is done once a minute.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable

EVERY_S = 60.0


def glibc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None with another C library, which has none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


@functools.cache
def keep_giving_back(every_s: float = EVERY_S) -> threading.Event:
    """Trim this process's heap every `every_s` seconds, on one thread of its own; set the event to end that."""
    over, trim = threading.Event(), glibc_trim()

    def work() -> None:
        while trim is not None and not over.wait(every_s):
            trim(0)

    threading.Thread(target=work, name="crosskv-free-memory", daemon=True).start()
    return over
