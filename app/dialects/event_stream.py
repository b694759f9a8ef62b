"""Server-sent events as clients and the proxies before them need them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Else nginx and its like hold a stream back until it is long enough."""
_DATA, _END = "data: {", "}\n\n"
_USAGE = ',"usage":'  # cannot occur inside a JSON string: there, its quotes would be escaped


def event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    """The answer that streams `events`, each written as server-sent events are."""
    return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)


def with_null_usage(event: str) -> str:
    """A chunk without usage, of a stream that ends with one that has it: OpenAI says `null` in the others."""
    if not event.startswith(_DATA) or not event.endswith(_END) or _USAGE in event:
        return event
    return f'{event.removesuffix(_END)},"usage":null{_END}'
