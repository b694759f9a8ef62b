"""Error messages that vLLM's handlers would write: one sentence for a body that does not validate, and none too long.

A field may be of several types, and an entry of a list one of many models, each of which has errors of its own. Told
is, in place of all that pydantic says, the field that most of them speak of: what is wrong with it is wrong for all.

vLLM's messages repeat what a client has sent. `sanitize_message` then looks for paths by a regular expression that
backtracks: a text of 16 KB such as `/a/a/a…` takes it a minute, on the event loop. So messages are cut before.

Leans on pydantic: the names of its errors' types and `ctx`, and `loc`, in which models and unions stand between the
names of fields. Leans on vLLM: `clean_loc_for_param`, which leaves out most of those; `sanitize_message`, which
`MODULES` import by its name. `tests/app/dialects/test_error_messages.py` holds that no other module of the ingress has
it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response
from vllm.entrypoints.anthropic import serving as anthropic_serving
from vllm.entrypoints.serve.exception_handling import error_response as vllms_response
from vllm.entrypoints.serve.exception_handling.handlers import http, validation
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

from app.gate.errors import error_response

MOST_CHARACTERS = 360
"""Of a message. The worst one of 1,000 takes vLLM's expression some 20 ms."""
MODULES = (vllms_response, http, validation, anthropic_serving)
_MOST_ERRORS = 500
_LONGEST_FIELD = 128
_LONGEST_REASON = 200
_MODEL = re.compile(r"[A-Z][A-Za-z0-9]*|.*-.*\[.*")
"""A model of pydantic's among the names of fields."""
_NOUNS = {
    "string": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list",
    "tuple": "a list", "dict": "an object", "model": "an object", "typed": "an object", "mapping": "an object",
    "iterable": "a list", "none": "null", "dataclass": "an object",
}  # fmt: skip
_TYPE_ERROR = re.compile(r"(string|int|float|bool|list|tuple|dict|model|typed|mapping|iterable|none|dataclass)_")
_OF_VALUES = ("string_too_long", "string_too_short", "string_pattern_mismatch", "int_parsing_size")
_SHOULD = "Input should be "


async def answer_wrong_body(request: Request, error: Exception) -> Response:
    """400 for a body that does not validate."""
    assert isinstance(error, RequestValidationError | ValidationError)
    message, param = sentence(error.errors(), "input" if "/responses" in request.url.path else "messages")
    return error_response(HTTPStatus.BAD_REQUEST, message, param=param)


def sentence(errors: Sequence[Any], within: str = "messages") -> tuple[str, str | None]:
    """What is told of these errors, and of which field.

    `within`: the field whose parts and calls vLLM validates late, so that their places begin with a number.
    """
    errors = [error for error in errors[:_MOST_ERRORS] if isinstance(error, dict)]
    fields = [_field(error.get("loc", ())) for error in errors]
    if not fields:
        return "The body has a field of the wrong type.", None
    counts = Counter(fields)
    field = max(counts, key=lambda one: (counts[one], len(one.split("."))))
    of_field = [error for error, name in zip(errors, fields, strict=True) if name == field]
    if field[:1].isdigit():
        return f"An entry in `{within}` is wrong: `{field}` {_reason(of_field)}.", within
    said = f"`{field}` {_reason(of_field)}." if field else f"The body {_reason(of_field)}."
    return said, field or None


def _field(loc: Sequence[Any]) -> str:
    kept = [part for part in loc if isinstance(part, int) or not _MODEL.fullmatch(part)]
    name = clean_loc_for_param(tuple(kept)) if kept else ""
    return name.removeprefix("body").removeprefix(".")[:_LONGEST_FIELD]


def _reason(errors: Sequence[Mapping[str, Any]]) -> str:
    nouns = dict.fromkeys(noun for error in errors if (noun := _noun(error["type"])) is not None)
    if nouns and len({error["type"] for error in errors} - {"literal_error", "missing"}) >= len(nouns):
        return f"must be {' or '.join(nouns)}"
    error = next((error for error in errors if error["type"] != "literal_error"), errors[0])
    kind, text = error["type"], str(error.get("msg", ""))
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not known"
    if kind == "too_long":
        return f"holds more than {error.get('ctx', {}).get('max_length')} entries"
    text = text.removeprefix("Value error, ").removesuffix(".")[:_LONGEST_REASON]
    return f"must be {text.removeprefix(_SHOULD)}" if text.startswith(_SHOULD) else f"is wrong: {text}"


def _noun(kind: str) -> str | None:
    found = None if kind in _OF_VALUES else _TYPE_ERROR.match(kind)
    return None if found is None else _NOUNS[found[1]]


def sanitize_cut(message: str) -> str:
    """vLLM's `sanitize_message` of the message's beginning, which says how much is left out."""
    left_out = len(message) - MOST_CHARACTERS
    if left_out <= 0:
        return sanitize_message(message)
    return f"{sanitize_message(message[:MOST_CHARACTERS])} … ({left_out} more characters)"


def cut_error_messages() -> None:
    """Let vLLM's handlers and serving classes sanitize by `sanitize_cut`, in this process."""
    for module in MODULES:
        module.sanitize_message = sanitize_cut  # type: ignore[attr-defined]
