"""Limits on what is read of a request: its body's size and time, its query's and its headers' size.

Only routes that take a body have theirs read, and all bodies that are being read have a sum (`OpenBodies`). The limits
hold when no Content-Length is sent, when the body comes byte by byte, and when its end never comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.gate.auth import CALLER, Caller
from app.gate.errors import error_response
from app.gate.request_id import LONGEST_REQUEST_ID, is_request_id

_LONGEST_LENGTH = 18  # digits; a longer Content-Length is over any limit, and not worth converting
MOST_PATH_BYTES = 8 * 1024
MOST_QUERY_BYTES = 1024 * 1024  # GET /api/v1/kv/lookup takes a prompt there
MOST_HEADER_BYTES = 64 * 1024
BODY_TIMEOUT_S = 60.0
"""From a request's headers to the end of its body."""
LINGER_S = 5.0
"""How long a client that was refused may send nothing before its connection is closed."""
OPEN_BODIES_BYTES = 64 * 1024**2
"""Of all bodies, and at least one body's most."""
FREE_BYTES = 16 * 1024
"""Of each body: they do not count."""
TENANTS_SHARE = 0.25


class NoRoomError(Exception):
    """There is no room for a body's next bytes."""


class OpenBodies:
    """How many bytes of bodies are being received at the same time, or announced: of one ingress.

    Invariants:

    * of each body the first `FREE_BYTES` do not count, so that large bodies, or slow ones, keep no small one out;
    * what counts is at most `most_bytes`, and of one tenant at most `most_of_one_bytes`;
    * a body that has been received, refused or given up counts no more.

    A body without room is refused, and does not wait: Ray Serve receives for the ingress, as much as comes. On the
    ingress's event loop.
    """

    def __init__(self, most_bytes: int, largest_bytes: int) -> None:
        """A tenant's part is a quarter of `most_bytes`, and at least a body of `largest_bytes`."""
        self.most_of_one_bytes = max(int(most_bytes * TENANTS_SHARE), largest_bytes)
        self.most_bytes = max(most_bytes, largest_bytes)
        self._of: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        """What counts now."""
        return self._of.total()

    def open(self, tenant: str) -> OpenBody:
        """One more body, as a context manager that ends with it."""
        return OpenBody(self, tenant)

    def _grow(self, tenant: str, by: int) -> None:
        if self._of[tenant] + by > self.most_of_one_bytes or self.nbytes + by > self.most_bytes:
            raise NoRoomError
        self._of[tenant] += by

    def _end(self, tenant: str, counted: int) -> None:
        self._of[tenant] -= counted
        if not self._of[tenant]:
            del self._of[tenant]


class OpenBody:
    """One body that is being received."""

    def __init__(self, all_of_them: OpenBodies, tenant: str) -> None:
        self._all = all_of_them
        self._tenant = tenant
        self._counted = 0

    def __enter__(self) -> OpenBody:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._all._end(self._tenant, self._counted)

    def has(self, nbytes: int) -> None:
        """Record that the body has `nbytes` by now, or will have. Raises NoRoomError."""
        counts = max(nbytes - FREE_BYTES, 0)
        if counts > self._counted:
            self._all._grow(self._tenant, counts - self._counted)
            self._counted = counts


class RefusedBodyError(Exception):
    """A body that is too large, too slow, or not wanted: a status, and a sentence for the client."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyLimitMiddleware:
    """Reads the whole body before the application runs: 413 once it is too large, 408 when its end does not come.

    Every route of ours parses its whole body as JSON, so reading it here costs no memory that is not needed anyway.
    A body for a route that takes none is answered 400; where there is no such route, it is not read. One body too many
    at the same time is answered 429. A path or query that is too long is answered 414, too large headers 431.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        body_timeout_s: float,
        open_bodies: OpenBodies,
        takes_body: Callable[[Scope], bool | None],
    ) -> None:
        """`takes_body`: whether a request's route does; None: there is no such route."""
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.open_bodies = open_bodies
        self.takes_body = takes_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller: Caller = scope[CALLER]
        headers = Headers(scope=scope)
        try:
            _check_head(scope)
            if _has_body(headers) and not (takes := self.takes_body(scope)):
                if takes is not None:
                    raise RefusedBodyError(HTTPStatus.BAD_REQUEST, f"{scope['method']} {scope['path']} takes no body.")
                rest: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]
            else:
                with self.open_bodies.open(caller.tenant) as body:
                    async with asyncio.timeout(self.body_timeout_s):
                        rest = await self._read(headers, receive, body)
        except TimeoutError:
            late = f"The request body did not end within {self.body_timeout_s:g} s."
            await _refuse(HTTPStatus.REQUEST_TIMEOUT, late, scope, receive, send)
            return
        except NoRoomError:
            full = "Too many large request bodies are being sent. Please try again later."
            await _refuse(HTTPStatus.TOO_MANY_REQUESTS, full, scope, receive, send)
            return
        except RefusedBodyError as error:
            await _refuse(error.status, str(error), scope, receive, send)
            return

        async def replay() -> Message:
            return rest.pop(0) if rest else await receive()

        await self.app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive, open_body: OpenBody) -> list[Message]:
        """The body as one message, followed by the client's disconnect when that came first."""
        too_large = RefusedBodyError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The request body is larger than {self.max_body_bytes} bytes."
        )
        declared = headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > _LONGEST_LENGTH or int(declared) > self.max_body_bytes):
            raise too_large
        open_body.has(int(declared) if declared.isdecimal() else 0)  # one without room costs no memory at all
        body = bytearray()  # one, however many chunks: a message for each byte would weigh hundreds of times the body
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return [message]
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                raise too_large
            open_body.has(len(body))
            if not message.get("more_body", False):
                return [{"type": "http.request", "body": bytes(body), "more_body": False}]


class LingerMiddleware:
    """Closes no connection while its client still sends: outermost, for what is inside may hold an answer back.

    To close on bytes that were not read takes from a client the answer that it was sent (RFC 9112, 9.6). So the rest of
    a body is read and thrown away once the answer is sent, until `LINGER_S` pass without any of it, or `BODY_TIMEOUT_S`
    in all. Where an answer does not end its connection, the HTTP server does the like by itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        ended = closes = False

        async def receive_and_note() -> Message:
            nonlocal ended
            message = await receive()
            ended = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def send_and_linger(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = Headers(raw=list(message.get("headers", []))).get("connection") == "close"
            if ended or not closes or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    while not ended:
                        await asyncio.wait_for(receive_and_note(), LINGER_S)
            await send({"type": "http.response.body", "body": b""})

        if scope["type"] == "http":
            await self.app(scope, receive_and_note, send_and_linger)
        else:
            await self.app(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0").strip("0") != "" or "transfer-encoding" in headers


def _check_head(scope: Scope) -> None:
    if len(scope.get("raw_path") or b"") > MOST_PATH_BYTES or len(scope["query_string"]) > MOST_QUERY_BYTES:
        raise RefusedBodyError(HTTPStatus.REQUEST_URI_TOO_LONG, "The path or the query of the request is too long.")
    if any(name == b"x-request-id" and len(value) > LONGEST_REQUEST_ID for name, value in scope["headers"]):
        raise RefusedBodyError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"X-Request-Id is longer than {LONGEST_REQUEST_ID} bytes."
        )
    if not all(is_request_id(value.decode("latin-1")) for name, value in scope["headers"] if name == b"x-request-id"):
        raise RefusedBodyError(HTTPStatus.BAD_REQUEST, "X-Request-Id must be printable ASCII characters, no spaces.")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
        raise RefusedBodyError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"The headers are larger than {MOST_HEADER_BYTES} bytes."
        )


async def _refuse(status: HTTPStatus, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    refusal = error_response(status, message, headers={"connection": "close"})
    await refusal(scope, receive, send)
