"""The end of a replica's process after its engine's death: once every request has heard of it.

The error that a request gets names those which may have ended the engine. A request that only sees its process end
knows nothing, is tried again, and may end a second engine. How long the errors take depends on the machine: on a busy
one a process may not run for half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable

LAST_WORDS_S = 0.5
"""Between the last request's error and the process's end: by then Ray has sent it."""
TURNS = 20
"""Of the event loop in that time, at least: where the process hardly runs, they take longer."""
MOST_LAST_WORDS_S = 10.0
"""From the engine's death on, whatever is still under way."""


def end_process_once_told(ongoing: Callable[[], int], loop: asyncio.AbstractEventLoop | None) -> threading.Thread:
    """End this process with status 1 when `ongoing()`, the number of requests in the engine, is 0 and all is sent.

    `loop` carries the requests; None: there was none. Returns the thread that waits.
    """
    thread = threading.Thread(target=_wait_and_end, args=(ongoing, loop), name="crosskv-end", daemon=True)
    thread.start()
    return thread


def _wait_and_end(ongoing: Callable[[], int], loop: asyncio.AbstractEventLoop | None) -> None:
    latest = time.monotonic() + MOST_LAST_WORDS_S
    quiet_turns = 0
    while quiet_turns < TURNS and time.monotonic() < latest:
        time.sleep(LAST_WORDS_S / TURNS)
        if loop is not None:
            turn = threading.Event()
            with contextlib.suppress(RuntimeError):  # it is closed, and carries nothing any more
                loop.call_soon_threadsafe(turn.set)
                turn.wait(latest - time.monotonic())
        quiet_turns = 0 if ongoing() else quiet_turns + 1
    os._exit(1)
