"""Errors as OpenAI's or Anthropic's clients expect them, from the gate, from vLLM and in a stream.

A request is Anthropic's by its path, or because it says its `anthropic-version`, as the official client always does.
Its answers name the request in the header `request-id`, where that client looks for it.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.dialects.errors import ErrorResponse, cut, in_openais_words
from app.gate.auth import route_path
from deployments.protocol.log_lines import REQUEST_ID

MESSAGES = "/v1/messages"
REQUEST_ID_HEADER = "request-id"
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def error_event(status: int, message: str) -> str:
    """The event with which a stream ends that cannot go on."""
    return f"event: error\ndata: {_error(status, message).decode()}\n\n"


class ErrorWordsMiddleware:
    """Rewrites the body of an error into the words of the API that was asked; status and headers stay."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        anthropics = _is_anthropics(scope)
        held: Message | None = None
        body = bytearray()

        async def send_rewritten(message: Message) -> None:
            nonlocal held
            if anthropics and message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = REQUEST_ID.get() or ""
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
                held = message
            elif held is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    rewritten = (_anthropics if anthropics else _openais)(held["status"], bytes(body))
                    headers = MutableHeaders(raw=list(held["headers"]))
                    if rewritten != body:
                        headers.update({"content-type": "application/json", "content-length": str(len(rewritten))})
                    await send({**held, "headers": headers.raw})
                    await send({"type": "http.response.body", "body": rewritten})

        await self.app(scope, receive, send_rewritten)


def _is_anthropics(scope: Scope) -> bool:
    path = route_path(scope)
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or "anthropic-version" in Headers(scope=scope)


def _error(status: int, message: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": "error", "error": {"type": kind, "message": cut(message)}, "request_id": REQUEST_ID.get() or None}
    return json.dumps(error, ensure_ascii=False).encode()


def _anthropics(status: int, body: bytes) -> bytes:
    """An error that has OpenAI's shape; what has none is told as it is."""
    error = _read(body)
    return _error(status, body.decode(errors="replace") if error is None else str(error.get("message")))


def _openais(status: int, body: bytes) -> bytes:
    """An error in OpenAI's words; what is no error of that shape stays as it is."""
    error = _read(body)
    return body if error is None else ErrorResponse(error=in_openais_words(status, error)).model_dump_json().encode()


def _read(body: bytes) -> dict[str, Any] | None:
    try:
        error = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return None
    return error if isinstance(error, dict) else None
