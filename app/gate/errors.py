"""Errors in OpenAI's shape, `{"error": {message, type, param, code}}`, for what vLLM's own handlers do not see.

vLLM answers everything that concerns a request's content. What is left are the answers of our middlewares (401, 413),
of the router (404, 405), and the two states of the service: too busy (429) and nothing can serve (503).

Leans on vLLM: `vllm.exceptions.GracefulHTTPError` (an exception that carries its HTTP status, which vLLM's
serving classes and handlers turn into an answer, before or within a stream) and `ErrorResponse` / `ErrorInfo`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import GracefulHTTPError

logger = logging.getLogger(__name__)


class OverloadedError(GracefulHTTPError):
    """The queue is full: 429, and `Retry-After` says when to come back."""

    def __init__(self, message: str = "Too many requests are waiting. Please try again later.") -> None:
        super().__init__(message, HTTPStatus.TOO_MANY_REQUESTS)


class UnavailableError(GracefulHTTPError):
    """Nothing can serve the request now: 503, and `Retry-After` says when to come back."""

    def __init__(self, message: str = "No replica can serve the request now. Please try again later.") -> None:
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE)


class PoisonPromptError(GracefulHTTPError):
    """The prompt has ended an engine: 500, for the prompt is not given to another one."""

    def __init__(self, refused_s: float) -> None:
        super().__init__(
            "The engine that computed this prompt ended because of it. The prompt is not tried again, and is refused "
            f"for {refused_s:.0f} s; change it, or tell the server's operator.",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )


class RefusedPromptError(GracefulHTTPError):
    """The prompt ended an engine a while ago: 503 without being tried."""

    def __init__(self, refused_s: float) -> None:
        super().__init__(
            f"This prompt has ended an engine, and is refused for another {refused_s:.0f} s. Change it, or tell the "
            "server's operator.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


def error_response(
    status: HTTPStatus, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error answer in the shape, and with the `type` and `code`, that vLLM gives its own.

    `app.protocols.error_words` puts both into the words of the API that was asked.
    """
    body = ErrorResponse(error=ErrorInfo(message=message, type=status.phrase, param=param, code=status.value))
    return JSONResponse(body.model_dump(), status_code=status.value, headers=dict(headers) if headers else None)


async def answer_router_error(request: Request, error: Exception) -> Response:
    """Unknown path and wrong method, which Starlette raises before vLLM's handlers apply."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = {
        HTTPStatus.NOT_FOUND: f"There is no {request.url.path}.",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.url.path} does not take {request.method}.",
    }.get(status, str(error.detail))
    return error_response(status, message, headers=error.headers)


class DefectMiddleware:
    """Answers 500 to an unexpected error, and logs it: the client sees no internals, and its connection lives on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            if scope["type"] != "http" or started:
                raise
            logger.exception("%s %r failed", scope["method"], scope["path"])  # a path may hold line breaks
            await error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal server error")(scope, receive, send)


RETRY_AFTER_S = 1
"""What `Retry-After` says where nothing knows better: rooms in the queue come and go by the second."""


class RetryAfterMiddleware:
    """Adds `Retry-After` to every 429 and 503, from whatever part of the server."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (
                HTTPStatus.TOO_MANY_REQUESTS,
                HTTPStatus.SERVICE_UNAVAILABLE,
            ):
                MutableHeaders(scope=message).setdefault("retry-after", str(RETRY_AFTER_S))
            await send(message)

        await self.app(scope, receive, send_with_header)
