"""Errors as Anthropic's clients expect them, whoever answers them: the gate, vLLM, or a stream.

A request is Anthropic's by its path, or because it says its `anthropic-version`, as the official client always does.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.gate.auth import route_path

MESSAGES = "/v1/messages"
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


class AnthropicErrorMiddleware:
    """Rewrites the body of an error that goes to one of Anthropic's clients; status and headers stay."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http" or not _is_anthropics(scope):
            await self.app(scope, receive, send)
            return
        held: Message | None = None
        body = bytearray()

        async def send_rewritten(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
                held = message
            elif held is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    rewritten = _error(held["status"], _message(bytes(body)))
                    headers = MutableHeaders(raw=list(held["headers"]))
                    headers.update({"content-type": "application/json", "content-length": str(len(rewritten))})
                    await send({**held, "headers": headers.raw})
                    await send({"type": "http.response.body", "body": rewritten})

        await self.app(scope, receive, send_rewritten)


def _is_anthropics(scope: Scope) -> bool:
    path = route_path(scope)
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or "anthropic-version" in Headers(scope=scope)


def _error(status: int, message: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}, ensure_ascii=False).encode()


def _message(body: bytes) -> str:
    """Of an error in OpenAI's shape; what is none is told as it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")
