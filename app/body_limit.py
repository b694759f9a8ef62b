"""A limit on request bodies that also holds when no Content-Length is sent."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import error_response

_LONGEST_LENGTH = 18  # digits; a longer Content-Length is over any limit, and not worth converting


class BodyLimitMiddleware:
    """Reads the whole body before the application runs, and answers 413 once it is larger than the limit.

    Every route of ours parses its whole body as JSON, so reading it here costs no memory that is not needed anyway.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        messages = await self._read(Headers(scope=scope), receive)
        if messages is None:
            refusal = error_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The request body is larger than {self.max_body_bytes} bytes.",
                headers={"connection": "close"},
            )
            await refusal(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> list[Message] | None:
        """The body's messages up to its end or the client's disconnect; None when it is too large."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > _LONGEST_LENGTH or int(declared) > self.max_body_bytes):
            return None
        messages: list[Message] = []
        size = 0
        while not messages or messages[-1].get("more_body", False):
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body_bytes:
                return None
            messages.append(message)
        return messages
