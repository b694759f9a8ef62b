"""Pending evictions of one shared tier: in order, in chunks, however long the tier takes.

The manager has given the room away, and forgotten the segments, when an eviction is ordered; the tier has them until it
has evicted them. So nothing is granted at a location before `settled`: else the room would not be there, or a segment
that is stored again would fall to the eviction of its first copy. A tier that is slow, or hangs, makes saves wait there
and come to nothing. It is heard or not by its heartbeat (`deployments.manager.tier_registry`), not by how long a chunk
takes.

On the manager's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvmanager.segments.keys import SegmentKey

logger = logging.getLogger(__name__)

CHUNK_KEYS = 1000
"""In one call to a tier: a CPU tier needs a few milliseconds, Redis two round trips."""
ANSWER_S = 60.0
"""Longest wait for one chunk: several times what a tier takes at its slowest. Then what it holds is unknown."""


class EvictionQueue:
    """The evictions of one tier's actor. `failed` is called, once, when one was not carried out."""

    def __init__(self, handle: Any, failed: Callable[[Exception], None]) -> None:
        self._handle = handle
        self._failed = failed
        self._waiting: deque[SegmentKey] = deque()
        self._empty = asyncio.Event()
        self._empty.set()
        self._broken = False
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Segments that the tier has not said it has evicted."""
        return len(self._waiting)

    def add(self, keys: Sequence[SegmentKey]) -> None:
        """Evict these after all that was added before, unless the tier has failed. Does not wait."""
        if keys and not self._broken:
            self._waiting.extend(keys)
            self._empty.clear()
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the tier has evicted all; False when it does not in time, or does not at all."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return not self._broken

    def close(self) -> None:
        """The tier is unregistered: forget what it was to evict."""
        self._broken = True
        self._waiting.clear()
        self._empty.set()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                chunk = [self._waiting[place] for place in range(min(CHUNK_KEYS, len(self._waiting)))]
                await asyncio.wait_for(self._handle.evict.remote(chunk), ANSWER_S)
                if self._broken:  # closed while the answer came
                    return
                for _ in chunk:
                    self._waiting.popleft()
            self._empty.set()
        except Exception as error:
            self._task = None
            self.close()
            self._failed(error)
