"""Chunks that are computed when a replica has nothing else to do: one at a time, until a prompt arrives.

A prompt that arrives meanwhile waits for the engine's step under way at most: the fill is aborted, and starts again
later, with what the device still holds of it. After `MOST_TRIES` it is given up, unless a caller waits for its end. On
the replica's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.replica.fill_queue import ColdChunk, FillQueue

QUIET_S = 0.05
"""Idle time of a replica before it fills: a client's next prompt often follows on an answer."""
MOST_TRIES = 8
"""Times that one chunk is begun, and interrupted."""
MOST_REMEMBERED = 4096


class IdleFills:
    """See the module's docstring.

    `fill` computes a chunk, says whether that went well, and raises nothing but CancelledError; `elsewhere` says that
    a chunk is being computed all the same; `settled` hears the name of what is not tried again soon.
    """

    def __init__(
        self,
        fill: Callable[[ColdChunk], Coroutine[Any, Any, bool]],
        elsewhere: Callable[[ColdChunk], bool],
        settled: Callable[[bytes], None],
        outcomes: Counter[str],
    ) -> None:
        """`outcomes`: counts what is `dropped`."""
        self._fill = fill
        self._elsewhere = elsewhere
        self._settled = settled
        self._outcomes = outcomes
        self._queue = FillQueue()
        self._prompts = 0
        """Under way: those of clients."""
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._tries: Counter[bytes] = Counter()
        self._waited_for: dict[bytes, list[asyncio.Future[bool]]] = {}
        self._current: ColdChunk | None = None
        self._task: asyncio.Task[bool] | None = None
        self._worker: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Chunks that wait."""
        return len(self._queue)

    def begins(self) -> None:
        """A client's prompt is here: what idle time was used for ends. Balanced by `ends`."""
        self._prompts += 1
        self._quiet.clear()
        if self._task is not None:
            self._task.cancel()

    def ends(self) -> None:
        """A client's prompt has left."""
        self._prompts -= 1
        if not self._prompts:
            self._quiet.set()

    def add(self, chunk: ColdChunk, first: bool = False) -> None:
        """Let a chunk wait for idle time; `first`: as its tenant's next."""
        for dropped in self._queue.add(chunk, first):
            self._outcomes["dropped"] += 1
            self._tell(dropped.key, False)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def end_of(self, chunk: ColdChunk) -> bool:
        """Let a chunk wait, and wait for its end; return whether it was computed. A cancelled caller takes it back."""
        end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waited_for.setdefault(chunk.key, []).append(end)
        is_current = self._current is not None and self._current.key == chunk.key
        adds = not is_current and chunk.key not in self._queue
        try:
            if adds:
                self.add(chunk)
            return await end
        finally:
            waiting = self._waited_for.get(chunk.key, [])
            if end in waiting:
                waiting.remove(end)
            if not waiting and self._waited_for.pop(chunk.key, None) is not None and adds:
                self._queue.remove(chunk.key)

    def forget_tries(self, key: bytes) -> None:
        """The chunk is settled: it may be begun as often again."""
        self._tries.pop(key, None)

    def close(self) -> None:
        """Give up what is under way."""
        for task in (self._worker, self._task):
            if task is not None:
                task.cancel()

    async def _work(self) -> None:
        """Fill what waits, one chunk at a time, as long as there is anything."""
        while len(self._queue):
            await self._quiet.wait()
            await asyncio.sleep(QUIET_S)
            if self._prompts:
                continue
            chunk = self._queue.take()
            if chunk is None:
                continue
            if self._elsewhere(chunk):
                self._tell(chunk.key, False)
                continue
            if len(self._tries) > MOST_REMEMBERED:  # of chunks that left the queue
                self._tries.clear()
            self._tries[chunk.key] += 1
            self._current = chunk
            self._task = asyncio.get_running_loop().create_task(self._fill(chunk))
            try:
                await asyncio.wait([self._task])
            finally:
                self._task.cancel()
            task, self._task, self._current = self._task, None, None
            if not task.cancelled():
                self._settled(chunk.key)
                self._tell(chunk.key, task.result())
            elif chunk.key in self._waited_for or self._tries[chunk.key] < MOST_TRIES:
                self.add(chunk, first=True)
            else:
                self._outcomes["dropped"] += 1
                self._settled(chunk.key)

    def _tell(self, key: bytes, well: bool) -> None:
        for end in self._waited_for.pop(key, []):
            if not end.done():
                end.set_result(well)
