"""When a chunk may be computed: as many at once as there are replicas, and most of them in idle time only.

Invariants:

* no more run at once than there are replicas;
* what is *urgent*, since a prompt waits for it, goes first, in the order in which it came;
* the rest begins when no client's prompt has been under way for `QUIET_S`, tenant by tenant in turn, and is cancelled
  when one comes. It begins again later, at the head of its tenant's line, `tries` times at most;
* a caller that is cancelled takes its work back, and frees its place.

On the ingress's event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

QUIET_S = 0.05
"""Idle time before anything begins: a client's next prompt often follows on an answer."""

Result = TypeVar("Result")


class InterruptedTooOftenError(Exception):
    """Prompts came so often that the work was given up."""


class PrecomputeTurns:
    """See the module's docstring."""

    def __init__(self, places: Callable[[], int]) -> None:
        """`places`: how many replicas there are now."""
        self._places = places
        self._prompts = 0
        """Of clients, under way."""
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._idle: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, whose turn is next first."""
        self._taken = 0
        self._running: set[asyncio.Task[Any]] = set()
        """What ends when a prompt comes."""
        self._quiet_from = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def begins(self) -> None:
        """A client's prompt is here: what idle time was used for ends. Balanced by `ends`."""
        self._prompts += 1
        for task in self._running:
            task.cancel()

    def ends(self) -> None:
        """A client's prompt has left."""
        self._prompts -= 1
        if not self._prompts:
            self._quiet_from = asyncio.get_running_loop().time() + QUIET_S
            self._look()

    async def at_once(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run `work` as soon as there is a place, and return or raise what it does."""
        await self._turn(self._urgent, "")
        try:
            return await work()
        finally:
            self._leave()

    async def when_idle(
        self, tenant: str, work: Callable[[], Coroutine[Any, Any, Result]], tries: int | None = None
    ) -> Result:
        """Run `work` in idle time, from its start again whenever a prompt has cancelled it.

        `tries`: how often at most; None: until it has ended. Returns or raises what it does; raises
        InterruptedTooOftenError after the last try.
        """
        tried = 0
        while True:
            line = self._idle.setdefault(tenant, deque())
            await self._turn(line, tenant, first=tried > 0)
            tried += 1
            task = asyncio.get_running_loop().create_task(work())
            self._running.add(task)
            if self._prompts:  # one has come since the turn was given
                task.cancel()
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
                self._running.discard(task)
                self._leave()
            if not task.cancelled():
                return task.result()
            if tried == tries:
                raise InterruptedTooOftenError

    async def _turn(self, line: deque[asyncio.Future[None]], tenant: str, first: bool = False) -> None:
        """Wait in a line, and hold a place; `_leave` must follow."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if first:
            line.appendleft(turn)
        else:
            line.append(turn)
        self._look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in line:
                line.remove(turn)
            elif not turn.cancelled():
                self._leave()
            if not line and self._idle.get(tenant) is line:
                del self._idle[tenant]
            raise

    def _leave(self) -> None:
        self._taken -= 1
        self._look()

    def _look(self) -> None:
        """Give the turns that can be given now; look again when the quiet is long enough."""
        places = max(1, self._places())
        while self._urgent and self._taken < places:
            self._begin(self._urgent)
        if self._prompts or not self._idle:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._quiet_from:
            if self._timer is None:
                self._timer = loop.call_at(self._quiet_from, self._look_later)
            return
        while self._idle and self._taken < places:
            tenant, line = next(iter(self._idle.items()))
            self._begin(line)
            if line:
                self._idle.move_to_end(tenant)
            else:
                del self._idle[tenant]

    def _look_later(self) -> None:
        self._timer = None
        self._look()

    def _begin(self, line: deque[asyncio.Future[None]]) -> None:
        turn = line.popleft()
        if not turn.done():  # else its caller has been cancelled
            self._taken += 1
            turn.set_result(None)
