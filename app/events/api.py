"""GET /api/v1/events: figures every second, routing decisions as they fall, and the manager's orders, as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.events.watchers import LAST, Event, Watcher, Watchers
from app.gate.auth import require_owner
from app.gate.request_context import current_request

PATHS = frozenset({"/api/v1/events"})
HEARTBEAT_S = 10.0
LONGEST_S = 3600.0
"""Then a stream ends, and its client comes again: what was forgotten anywhere on the way is not held for ever."""
UNREAD_S = 10.0
"""How much longer a client has that does not read: then its connection is closed."""
Clock = Callable[[], float]
_STREAM: Any = {
    200: {
        "description": "Server-sent events.",
        "content": {"text/event-stream": {"schema": {"type": "object", "description": "A server-sent event."}}},
    }
}
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


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
