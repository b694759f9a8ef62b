"""GET /api/v1/events: the clients that watch, and the events that wait to be sent to each, as a stream.

Invariants: at most `MOST_WATCHERS` watch, `MOST_OF_A_TENANT` of one tenant; tenants together do not keep administrators
out. For each watcher wait at most `MOST_WAITING` events, of which the oldest is dropped, and it is told how many were
(`dropped`); of the figures of a second only the newest wait. A watcher is told of its own tenant only, an administrator
of all. Telling costs O(watchers). One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import APIRouter
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.gate.auth import Caller, require_owner
from app.gate.errors import OverloadedError, UnavailableError
from app.gate.request_context import current_request

PATHS = frozenset({"/api/v1/events"})
HEARTBEAT_S = 10.0
LONGEST_S = 3600.0
"""Then a stream ends, and its client comes again: what was forgotten anywhere on the way is not held for ever."""
UNREAD_S = 10.0
"""How much longer a client has that does not read: then its connection is closed."""
_STREAM: Any = {
    200: {
        "description": "Server-sent events.",
        "content": {"text/event-stream": {"schema": {"type": "object", "description": "A server-sent event."}}},
    }
}
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
MOST_WATCHERS = 64
MOST_OF_A_TENANT = 8
MOST_WAITING = 256

Clock = Callable[[], float]
Event = tuple[str, dict[str, Any]]
"""Its name, and what it says."""
LAST: Event = ("restarting", {})
"""What a server says that stops or restarts; a stream ends with it."""


class Watcher:
    """One client that watches."""

    def __init__(self, caller: Caller) -> None:
        self.tenant = caller.tenant
        self.admin = caller.admin
        self._waiting: deque[Event] = deque()
        self._figures: Event | None = None
        self._dropped = 0
        self._there = asyncio.Event()

    def sees(self, tenant: str) -> bool:
        """Whether it may know what a tenant does."""
        return self.admin or tenant == self.tenant

    def tell(self, event: Event) -> None:
        """Let an event wait; the oldest gives way."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        self._there.set()

    def show(self, figures: Event) -> None:
        """Let these figures wait in place of older ones."""
        self._figures = figures
        self._there.set()

    async def next(self, timeout_s: float) -> list[Event]:
        """What waits, oldest first, as soon as there is anything; nothing after `timeout_s`."""
        try:
            await asyncio.wait_for(self._there.wait(), timeout_s)
        except TimeoutError:
            return []
        self._there.clear()
        found = [("dropped", {"events": self._dropped})] if self._dropped else []
        found += self._waiting
        if self._figures is not None:
            found.append(self._figures)
        self._waiting.clear()
        self._figures, self._dropped = None, 0
        return found


class Watchers:
    """All clients that watch through this ingress. `changed` is called when one has come or gone."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.changed = changed
        self._watchers: dict[Watcher, None] = {}
        self._of_tenant: Counter[str] = Counter()
        self._ended = False

    def __len__(self) -> int:
        return len(self._watchers)

    def __iter__(self) -> Iterator[Watcher]:
        return iter(self._watchers)

    @contextmanager
    def one_more(self, caller: Caller) -> Iterator[Watcher]:
        """A watcher, for as long as it watches.

        Raises:
            OverloadedError: there are as many as there may be.
            UnavailableError: this server ends; another one may take its place.
        """
        if self._ended:
            raise UnavailableError("The server is stopping or restarting. Please try again later.")
        full = not caller.admin and len(self._watchers) >= MOST_WATCHERS
        if full or self._of_tenant[caller.tenant] >= MOST_OF_A_TENANT:
            raise OverloadedError("Too many clients watch already. Please close one, or try again later.")
        watcher = Watcher(caller)
        self._watchers[watcher] = None
        self._of_tenant[caller.tenant] += 1
        self.changed()
        try:
            yield watcher
        finally:
            del self._watchers[watcher]
            self._of_tenant[caller.tenant] -= 1
            if not self._of_tenant[caller.tenant]:
                del self._of_tenant[caller.tenant]
            self.changed()

    def end(self) -> None:
        """Let all go, and take no more: a server that ends waits for its streams."""
        self._ended = True
        for watcher in self._watchers:
            watcher.tell(LAST)

    def tell(self, tenant: str, name: str, said: dict[str, Any], more_for_admins: dict[str, Any]) -> None:
        """Something has happened to a tenant."""
        for watcher in self._watchers:
            if watcher.sees(tenant):
                watcher.tell((name, {**said, **more_for_admins} if watcher.admin else said))

    def tell_admins(self, name: str, said: dict[str, Any]) -> None:
        """Something has happened that concerns all tenants, or none."""
        for watcher in self._watchers:
            if watcher.admin:
                watcher.tell((name, said))


class _Watched(StreamingResponse):
    """A stream that gives its watcher's place back, however it ends, and also if it never begins."""

    media_type = "text/event-stream"

    def __init__(self, watcher: Watcher, held: ExitStack, clock: Clock) -> None:
        super().__init__(events_of(watcher, clock), headers=_HEADERS)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Starlette's."""
        with self._held, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_S + UNREAD_S):
                await super().__call__(scope, receive, send)


def events_router(watchers: Watchers, clock: Clock = time.monotonic) -> APIRouter:
    """The route. `clock`: in seconds; when a stream's time is over."""
    router = APIRouter()

    @router.get("/api/v1/events", response_class=StreamingResponse, responses=_STREAM)
    async def events() -> StreamingResponse:
        """What the cache does, live, as server-sent events; a tenant is told of its own prompts and bytes only.

        `cache`: tiers and replicas, about once a second. `route`: where a prompt went, with its first token.
        `directive`, for administrators: what the KV manager has ordered. `dropped`: what this client was too slow for.
        `restarting`: the last event of a server that stops or restarts.
        """
        caller = current_request().caller
        require_owner(caller)
        held = ExitStack()
        return _Watched(held.enter_context(watchers.one_more(caller)), held, clock)

    return router


async def events_of(watcher: Watcher, clock: Clock) -> AsyncIterator[str]:
    """What a watcher is told, as server-sent events, until its time is over: also while there is nothing to tell."""
    end = clock() + LONGEST_S
    yield ": the cache, live\nretry: 2000\n\n"
    while (left := end - clock()) > 0:
        found = await watcher.next(min(HEARTBEAT_S, left))
        if LAST in found:
            yield "".join(map(_written, found[: found.index(LAST) + 1]))
            return
        yield "".join(map(_written, found)) or ": nothing new\n\n"


def _written(event: Event) -> str:
    name, said = event
    return f"event: {name}\ndata: {json.dumps(said, separators=(',', ':'))}\n\n"
