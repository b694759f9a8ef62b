"""GET /openapi.json and GET /docs: what this server takes and answers, made of its own routes.

`app.document` writes docs/guide/http_api.md from the same description.

FastAPI describes each route's parameters, body and success. What every route has in common is added here: the answers
of the middlewares, errors in OpenAI's shape, the API key. The page needs no script and no other host.

Leans on vLLM: its handlers answer 400 where FastAPI would answer 422, and `AnthropicErrorResponse`. Errors in OpenAI's
words (`app.dialects.errors`) have the name of vLLM's here, which routes give as their own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, Response
from vllm.entrypoints.anthropic.protocol import AnthropicErrorResponse

from app.dialects.errors import ErrorResponse
from app.gate.errors import UnavailableError
from app.page.files import HEADERS as PAGE_HEADERS

logger = logging.getLogger(__name__)

PATHS = frozenset({"/openapi.json", "/docs"})
_METHODS = ("get", "post")
_ALWAYS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.REQUEST_URI_TOO_LONG,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
_WITH_A_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_WITH_A_BODY = (HTTPStatus.NOT_FOUND, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)  # 404: no such model
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {
    "string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "object": "object",
}  # fmt: skip
_REF = "#/components/schemas/{model}"
_ANTHROPICS = "/v1/messages"
_STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .5em;text-align:left;"
    "vertical-align:top}code{font-family:monospace}"
)
_STYLES_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    **PAGE_HEADERS,
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLES_DIGEST}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}
"""The chat page's, with a policy that lets the description load nothing at all."""
_DESCRIPTION = """OpenAI's and Anthropic's APIs, the cache's control API and the server's own state. Request bodies are
JSON in UTF-8. A streamed answer is a `text/event-stream` of the protocol's events; an error after its first event is
an event of its own.
Prompts are text: parts of a message that are images, audio or video are refused and their URLs never fetched.
In a chat, special tokens that a client writes are text; in /v1/completions and /tokenize they are what they name."""


@dataclass(frozen=True, slots=True)
class RouteField:
    """A query parameter, or a field of the body. `allowed`: its type and bounds, in words."""

    name: str
    allowed: str
    required: bool
    text: str


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the description. `answers`: status to its text."""

    method: str
    path: str
    text: str
    fields: tuple[RouteField, ...]
    answers: Mapping[str, str]


def add_description(app: FastAPI, open_paths: Collection[str]) -> None:
    """Serve the description of the routes of `app`; `open_paths` need no key.

    It takes seconds, so no start waits for it: a thread makes it once, at the first request. Where that fails, all
    waiting requests are answered 503, and the next request tries again.
    """
    making: asyncio.Future[tuple[bytes, str]] | None = None
    logged = False

    def make() -> tuple[bytes, str]:
        schema = describe(app, open_paths)
        return json.dumps(schema, separators=(",", ":")).encode(), _page(schema)

    async def made() -> tuple[bytes, str]:
        nonlocal making, logged
        if making is None:
            making = asyncio.ensure_future(asyncio.to_thread(make))
        awaited = making
        try:
            return await asyncio.shield(awaited)  # a client that leaves does not end it for others
        except Exception as error:
            if making is awaited:
                making = None
            if not logged:  # strangers may ask, as often as they like
                logged = True
                logger.exception("the description of the API cannot be made")
            raise UnavailableError("The description of the API cannot be made. Please try again later.") from error

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response((await made())[0], media_type="application/json", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse((await made())[1], headers=_HEADERS)


def describe(app: FastAPI, open_paths: Collection[str]) -> dict[str, Any]:
    """The OpenAPI description of the routes that `app` has by now."""
    schema = get_openapi(title="crosskv", version="1", description=_DESCRIPTION, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for model in (ErrorResponse, AnthropicErrorResponse):
        error = model.model_json_schema(ref_template=_REF)
        schemas.update(error.pop("$defs"))
        schemas[model.__name__] = error
    components["securitySchemes"] = {
        "ApiKey": {"type": "http", "scheme": "bearer"},
        "AnthropicsKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, _, operation in _operations(schema):
        operation.setdefault("description", "")
        is_open = path in open_paths
        if not is_open:
            operation["security"] = [{"ApiKey": []}, {"AnthropicsKey": []}]
        responses = operation["responses"]
        responses.pop("422", None)
        statuses = [*_ALWAYS, *(() if is_open else _WITH_A_KEY), *(_WITH_A_BODY if "requestBody" in operation else ())]
        for status in statuses:
            responses.setdefault(str(status.value), _error(status, path.startswith(_ANTHROPICS)))
    return schema


def _error(status: HTTPStatus, anthropics: bool) -> dict[str, Any]:
    shape = AnthropicErrorResponse if anthropics else ErrorResponse
    answer: dict[str, Any] = {
        "description": status.phrase,
        "content": {"application/json": {"schema": {"$ref": _REF.format(model=shape.__name__)}}},
    }
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        answer["headers"] = {
            "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}, "required": True}
        }
    return answer


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in schema["paths"].items():
        for method in _METHODS:
            if method in item:
                yield path, method, item[method]


def routes(schema: dict[str, Any]) -> list[Route]:
    """The operations of a description (`describe`), in its order."""
    return [
        Route(
            method.upper(),
            path,
            operation.get("description", ""),
            tuple(_fields(operation, schema)),
            {code: of["description"] for code, of in sorted(operation["responses"].items())},
        )
        for path, method, operation in _operations(schema)
    ]


def _fields(operation: dict[str, Any], schema: dict[str, Any]) -> Iterator[RouteField]:
    for field in operation.get("parameters", ()):
        yield _field(field["name"], field["schema"], field.get("required", False), field.get("description", ""))
    for name in _body_models(operation):
        model = schema["components"]["schemas"][name]
        for field, of in model.get("properties", {}).items():
            yield _field(field, of, field in model.get("required", ()), of.get("description", ""))


def _field(name: str, of: dict[str, Any], required: bool, text: str) -> RouteField:
    return RouteField(name, _allowed(of), required, text)


def _page(schema: dict[str, Any]) -> str:
    sections = "".join(map(_section, routes(schema)))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>crosskv API</title>"
        f"<style>{_STYLE}</style>"
        f"<h1>crosskv API</h1><p>{escape(schema['info']['description'])}</p>"
        "<p>The same for programs: <a href=openapi.json>openapi.json</a>.</p>"
        f"{sections}</html>"
    )


def _section(route: Route) -> str:
    fields = "".join(
        f"<tr><td><code>{escape(field.name)}</code><td>{escape(field.allowed)}<td>{escape(field.text)}"
        for field in route.fields
    )
    answers = ", ".join(f"{code} {escape(text)}" for code, text in route.answers.items())
    return (
        f"<h2><code>{route.method} {escape(route.path)}</code></h2><p>{escape(route.text)}</p>"
        + (f"<table><tr><th>field<th>type<th>what{fields}</table>" if fields else "")
        + f"<p>Answers: {answers}.</p>"
    )


def _body_models(operation: dict[str, Any]) -> list[str]:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return [one["$ref"].rpartition("/")[2] for one in body.get("anyOf", [body]) if "$ref" in one]


def _allowed(schema: dict[str, Any]) -> str:
    bounds = [f"{sign} {schema[rule]:g}" for rule, sign in _SIGNS.items() if rule in schema]
    default = schema.get("default")
    shown = "" if default is None else f"; {json.dumps(default)} by default"
    return ", ".join([_type(schema), *bounds]) + shown


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return _TYPES.get(str(schema.get("type", schema.get("const", "anything"))), str(schema.get("const", "anything")))
