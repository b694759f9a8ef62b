"""Callers that wait for a change of the index, and the work on the index that is done in slices.

On the manager's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from kvmanager.manager import KVManager
from kvmanager.moves.directives import Evict

logger = logging.getLogger(__name__)


class IndexWatch:
    """See the module's docstring. `send` takes the evictions that a slice orders."""

    def __init__(self, brain: KVManager, send: Callable[[Sequence[Evict]], None]) -> None:
        self._brain = brain
        self._send = send
        self._changed = asyncio.Event()
        self._sweeping: asyncio.Future[None] = asyncio.get_event_loop().create_future()
        self._sweeping.set_result(None)

    def wake(self) -> None:
        """The index may have changed: wake the callers that wait for it, and begin the work to do in slices."""
        self._changed.set()
        if self._brain.sweeping and self._sweeping.done():
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def changed(self, wait_s: float) -> None:
        """Return at the next change, at the latest after `wait_s`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), wait_s)

    async def swept(self, wait_s: float) -> None:
        """Return when what has begun is done, at the latest after `wait_s`."""
        await asyncio.wait([self._sweeping], timeout=wait_s)

    async def _sweep(self) -> None:
        """Do what the brain does in slices (`kvmanager.index.sweeps`); after each, requests that wait for a plan get
        it."""
        try:
            while self._brain.sweeping:
                self._send(self._brain.sweep(time.monotonic()))
                await asyncio.sleep(0)
        except Exception:
            logger.exception("the index could not be swept")
