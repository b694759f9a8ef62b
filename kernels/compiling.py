"""One process compiles for all: the others wait for what it leaves in Numba's cache.

The processes of a server start at the same time. In a fresh checkout each would compile the same functions, on cores
that the others need.

Leans on `numba.core.registry.cpu_target`: Numba reads its own typings there before its first function, which takes ten
times as long as to load a compiled one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from numba.core.registry import cpu_target  # type: ignore[import-untyped]

LONGEST_WAIT_S = 60.0
"""Ten times what compiling a room takes. Then a process compiles for itself."""
_LOOK_EVERY_S = 0.02


@contextlib.contextmanager
def one_compiles(room: str, longest_wait_s: float = LONGEST_WAIT_S) -> Iterator[None]:
    """Compile a room of `kernels` inside: other processes that do so wait at its folder, at most `longest_wait_s`.

    Blocks. A process that ends lets the others go on. Where the file system has no locks, no process waits.
    """
    cpu_target.typing_context.refresh()  # before the lock: processes that find all compiled pass it in turn
    cpu_target.target_context.refresh()
    folder = os.open(Path(__file__).parent / room, os.O_RDONLY)
    try:
        _lock(folder, time.monotonic() + longest_wait_s)
        yield
    finally:
        os.close(folder)  # which unlocks it


def _lock(folder: int, until: float) -> None:
    """Lock an open folder, or give up."""
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return
            time.sleep(_LOOK_EVERY_S)
        except OSError:
            return
        else:
            return
