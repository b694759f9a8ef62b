"""How long a wait may take: the seconds of a machine at rest, stretched by how slow this one is.

`until(holds, what, within_s)` waits for a condition, `patience(seconds)` is for a deadline that something else keeps,
such as `thread.join(patience(20))`. Seconds are those of two idle cores, with room: ten times what it takes there. The
speed is measured once in each process, when the first deadline is asked for: under .2 s on a machine at rest.
"""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

PATIENCE_S = 120.0
"""Longest wait for anything, on a machine at rest; reached only when something hangs."""
PAUSE_S = 0.005
PAUSES_GROW = 1.2

REFERENCE_S = 0.2
"""What `_errand` takes on two idle cores of 2023, with room for a neighbour's work."""
_ROUNDS = 4
_STEPS = 300_000
MOST = 10.0
"""How much longer than on a machine at rest a wait may be. A slower machine cannot run the suite."""


class Clock(Protocol):
    """The module `time`, or a test's own."""

    def monotonic(self) -> float:
        """Seconds since any moment."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Let `seconds` pass."""
        ...


def _errand() -> None:
    """What tests wait for, in small: computing, and processes that start."""
    for _ in range(_ROUNDS):
        functools.reduce(lambda total, step: (total * 31 + step) % 1_000_003, range(_STEPS))
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)


def measured(errand: Callable[[], None] = _errand, clock: Callable[[], float] = time.perf_counter) -> float:
    """How many times longer than at rest an errand takes now, 1 to MOST."""
    began = clock()
    errand()
    return min(max((clock() - began) / REFERENCE_S, 1.0), MOST)


@functools.cache
def slowness() -> float:
    """How many times slower than a machine at rest this one is, measured at the first call in this process."""
    return measured()


def patience(seconds: float) -> float:
    """A deadline for what takes less than `seconds` on a machine at rest."""
    return seconds * slowness()


def until(
    holds: Callable[[], Any],
    what: str,
    within_s: float = PATIENCE_S,
    pause_s: float = PAUSE_S,
    longest_pause_s: float = PAUSE_S,
    clock: Clock = time,
) -> None:
    """Ask until `holds`, ever more seldom up to `longest_pause_s`. Raises TimeoutError after `patience(within_s)`.

    `what` is the sentence that has to become true. Blocks; for a coroutine, see `until_it_holds`.
    """
    for pause in _pauses(holds, what, within_s, pause_s, longest_pause_s, clock):
        clock.sleep(pause)


async def until_it_holds(holds: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> None:
    """`until`, on an event loop that goes on meanwhile."""
    for pause in _pauses(holds, what, within_s, PAUSE_S, PAUSE_S, time):
        await asyncio.sleep(pause)


def _pauses(
    holds: Callable[[], Any], what: str, within_s: float, pause_s: float, longest_pause_s: float, clock: Clock
) -> Iterator[float]:
    """How long to pause before each further question."""
    began, limit_s, stretched = clock.monotonic(), within_s, False
    while not holds():
        if clock.monotonic() - began > limit_s and not stretched:
            # Only now, and once: a wait that ends in time is no reason to measure.
            limit_s, stretched = patience(within_s), True
        if clock.monotonic() - began > limit_s:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        yield pause_s
        pause_s = min(pause_s * PAUSES_GROW, longest_pause_s)
