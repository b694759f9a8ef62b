"""GET /openapi.json and GET /docs: what this server takes and answers, made of its own routes.

FastAPI describes each route's parameters, body and success. What every route has in common is added here: the answers
of the middlewares, errors in OpenAI's shape, the API key. The page needs no script and no other host.

Leans on vllm 0.32.0: its handlers answer 400 where FastAPI would answer 422, and `ErrorResponse`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from html import escape
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

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
_REF = "#/components/schemas/{model}"
_DESCRIPTION = """OpenAI's API, the cache's control API and the server's own state. Request bodies are JSON in UTF-8.
A streamed answer is a `text/event-stream` of OpenAI's chunks; an error after its first event is an event of its own.
Prompts are text: parts of a message that are images, audio or video are refused and their URLs never fetched.
In a chat, special tokens that a client writes are text; in /v1/completions and /tokenize they are what they name."""


def add_description(app: FastAPI, open_paths: Collection[str]) -> None:
    """Serve the description of the routes that `app` has by now; `open_paths` need no key."""
    schema = _describe(app, open_paths)
    page = _page(schema)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(schema)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page)


def _describe(app: FastAPI, open_paths: Collection[str]) -> dict[str, Any]:
    schema = get_openapi(title="crosskv", version="1", description=_DESCRIPTION, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    error = ErrorResponse.model_json_schema(ref_template=_REF)
    schemas.update(error.pop("$defs"))
    schemas["ErrorResponse"] = error
    components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    for path, _, operation in _operations(schema):
        is_open = path in open_paths
        if not is_open:
            operation["security"] = [{"ApiKey": []}]
        responses = operation["responses"]
        responses.pop("422", None)
        statuses = [*_ALWAYS, *(() if is_open else _WITH_A_KEY), *(_WITH_A_BODY if "requestBody" in operation else ())]
        for status in statuses:
            responses.setdefault(str(status.value), _error(status))
    return schema


def _error(status: HTTPStatus) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": status.phrase,
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="ErrorResponse")}}},
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


def _page(schema: dict[str, Any]) -> str:
    sections = "".join(_section(path, method, operation, schema) for path, method, operation in _operations(schema))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>crosskv API</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .5em;text-align:left;"
        "vertical-align:top}code{font-family:monospace}</style>"
        f"<h1>crosskv API</h1><p>{escape(schema['info']['description'])}</p>"
        "<p>The same for programs: <a href=openapi.json>openapi.json</a>.</p>"
        f"{sections}</html>"
    )


def _section(path: str, method: str, operation: dict[str, Any], schema: dict[str, Any]) -> str:
    rows = [(field["name"], field["schema"], field.get("description", "")) for field in operation.get("parameters", ())]
    for name in _body_models(operation):
        model = schema["components"]["schemas"][name]
        rows += [(field, of, of.get("description", "")) for field, of in model.get("properties", {}).items()]
    fields = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(_type(of))}<td>{escape(text)}" for name, of, text in rows
    )
    answers = ", ".join(f"{code} {escape(of['description'])}" for code, of in sorted(operation["responses"].items()))
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
        + (f"<table><tr><th>field<th>type<th>what{fields}</table>" if fields else "")
        + f"<p>Answers: {answers}.</p>"
    )


def _body_models(operation: dict[str, Any]) -> list[str]:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return [one["$ref"].rpartition("/")[2] for one in body.get("anyOf", [body]) if "$ref" in one]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    return str(schema.get("type", schema.get("const", "anything")))
