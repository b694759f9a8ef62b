"""The work of a piece of Python, counted in calls: the same on every machine."""

import gc
import sys


def calls_of(work):
    """Return the number of Python calls that ``work`` makes."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    gc.disable()  # a collection in between calls back, too
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
