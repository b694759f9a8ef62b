"""Blends one at a time, first come, first served, in slices between the engine's steps.

A slice runs items for as long as the engine's last step took, then lets the engine step and comes back: during another
prompt's prefill, whose steps are long, a blend has half of the time. It has `SLICE_S` at least. Where a request decodes
and there is a target from token to token (`engine.tpot_target_s`), a slice takes no more than its share of that. A
blend that waits for bytes is poked when they are there; the blends behind it wait too. A wait in vain also counts for
the blends behind it: with a tier that hangs, they do not each wait in turn. On the engine thread, except `poke`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

SLICE_S, LONGEST_SLICE_S = 0.03, 1.0
"""What a neighbour's token waits for, about: an item is not divided. The longest one does not count as hung."""


MOST_WAITING = 16
"""Blends that wait for another one; beyond them prompts are computed."""


class QueuedBlend(Protocol):
    """A blend in the queue."""

    request_id: str
    blocks: int
    """Device blocks that it holds until it has ended."""

    def advance(self, until: float) -> bool | None:
        """Go on until `until`, on `time.perf_counter`'s clock: True: there is more; None: it waits; False: it ended.

        Does not raise.
        """
        ...

    def cancel(self) -> None:
        """Mark it as unwanted: the next `advance` ends it as soon as nothing writes into its blocks."""
        ...

    @property
    def vain_s(self) -> float:
        """Seconds that it has waited, up to now, for bytes that did not all come."""
        ...

    def waited(self, seconds: float) -> bool:
        """Count an earlier blend's wait in vain. True: its own time is over with that, and its `advance` ends it."""
        ...


class BlendQueue:
    """See the module's docstring. `call` runs a function on the engine thread between two steps, from any thread."""

    def __init__(
        self,
        call: Callable[[Callable[[], None]], Any],
        max_waiting: int,
        max_blocks: int,
        most_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`max_blocks`: what blends may hold of the device before another one is refused.

        `most_s`: what the next slice may take; None: as long as the engine's last step.
        """
        self._most_s = most_s
        self._call = call
        self._max_waiting = max_waiting
        self._max_blocks = max_blocks
        self._queue: deque[QueuedBlend] = deque()
        self._posted = False
        self._told_s = 0.0
        """Of the first one's `vain_s`: those behind it know of it."""
        self._left_at: float | None = None
        """When the last slice ended, if its blend goes on: what has passed since then was the engine's."""
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether as many wait as may."""
        return len(self._queue) > self._max_waiting

    def has_room(self, blocks: int) -> bool:
        """Return whether another blend of `blocks` blocks may come. One of any size is made; `max_waiting` wait."""
        held = sum(blend.blocks for blend in self._queue)
        return not self._queue or (not self.is_full and held + blocks <= self._max_blocks)

    def put(self, blend: QueuedBlend) -> None:
        """Make it when those before it have ended."""
        self._queue.append(blend)
        self.poke()

    def cancel(self, request_id: str) -> None:
        """A request has gone; one without a blend is no error. Its blend ends without waiting for those before it."""
        for blend in list(self._queue):
            if blend.request_id == request_id:
                blend.cancel()
                if blend is not self._queue[0] and blend.advance(0.0) is False:
                    self._queue.remove(blend)
                self.poke()

    def poke(self) -> None:
        """Look again: the bytes that the first blend waits for may be there. Any thread."""
        with self._lock:
            if self._posted:
                return
            self._posted = True
        self._call(self._slice)

    def _slice(self) -> None:
        with self._lock:
            self._posted = False
        if not self._queue:
            return
        now = time.perf_counter()
        step_s = 0.0 if self._left_at is None else now - self._left_at
        slice_s, most_s = min(max(SLICE_S, step_s), LONGEST_SLICE_S), self._most_s()
        first = self._queue[0]
        goes_on = first.advance(now + (slice_s if most_s is None else min(slice_s, most_s)))
        self._left_at = time.perf_counter() if goes_on else None
        self._tell(first)
        if goes_on is False:
            self._queue.popleft()
            self._told_s = 0.0
        if goes_on is not None and self._queue:
            self.poke()

    def _tell(self, first: QueuedBlend) -> None:
        """Let those behind know what the first one has waited in vain; whose time is over leaves at once."""
        seconds, self._told_s = first.vain_s - self._told_s, first.vain_s
        if seconds <= 0:
            return
        for blend in list(self._queue)[1:]:
            if blend.waited(seconds) and blend.advance(0.0) is False:
                self._queue.remove(blend)
