"""Errors in OpenAI's words: its types, codes that are text, and a param that is the field's name.

All parts give them as vLLM does, with the status as a number; this is what goes out (`app.protocols.error_words`
for those who speak Anthropic's).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

MOST_CHARACTERS = 400
"""Of a message."""
_CUT = " …"
_TYPES = {HTTPStatus.FORBIDDEN: "permission_error", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}
_CODES = {
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
    HTTPStatus.INTERNAL_SERVER_ERROR: "internal_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable",
}
"""Of these statuses. A stream's error has no status but this."""
_OF_CONTEXT = ("maximum context length", "the model's context", "max_model_len")
"""What messages of prompts that are too long say, vLLM's and ours."""
_BODY = "body."
_EVENT = "data: "


class ErrorInfo(BaseModel):
    """What is told of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorInfo


def in_openais_words(status: int, error: Mapping[str, Any]) -> ErrorInfo:
    """An error, of which vLLM's or our own words are given, as OpenAI's clients know it."""
    message, param = str(error.get("message") or HTTPStatus(status).phrase), error.get("param")
    code = _CODES.get(status)  # type: ignore[call-overload]
    if status == HTTPStatus.NOT_FOUND and param == "model":
        code = "model_not_found"
    elif status == HTTPStatus.BAD_REQUEST and any(words in message for words in _OF_CONTEXT):
        code = "context_length_exceeded"
    other = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return ErrorInfo(
        message=cut(message),
        type=_TYPES.get(status, other),  # type: ignore[call-overload]
        param=param.removeprefix(_BODY) if isinstance(param, str) else None,
        code=code,
    )


def cut(message: str) -> str:
    """A message of at most `MOST_CHARACTERS`."""
    return message if len(message) <= MOST_CHARACTERS else message[: MOST_CHARACTERS - len(_CUT)] + _CUT


def event_in_openais_words(event: str) -> str:
    """A stream's event that is an error, as vLLM writes it."""
    error = json.loads(event.removeprefix(_EVENT))["error"]
    told = ErrorResponse(error=in_openais_words(int(error["code"]), error))
    return f"{_EVENT}{told.model_dump_json()}\n\n"
