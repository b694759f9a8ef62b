"""Routes that take a JSON body: it is read once, within bounds, before FastAPI and vLLM validate it.

Those of GET among them refuse parameters that they do not have.

Where it may be left out, no body is none, whatever the headers say. The bounds are in `app.state.request_bounds`, what
changes a route's bodies before that (`app.dialects`) by its path in `app.state.readings`.

Of a list with many wrong entries only the first is told. An item of Responses is one of some thirty types and has 200
errors when it is none of them: 4,000 such items, a body of 52 KB, would hold up all streams for ten seconds.

Leans on FastAPI: `Dependant.body_params`, and of a `ModelField` its `_type_adapter`. Leans on pydantic:
`fail_fast` in a core schema, and `SchemaValidator`, which else takes nested models' own validators.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import SchemaValidator
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from app.gate.request_bounds import RequestBounds
from app.gate.request_context import current_request

logger = logging.getLogger(__name__)

LARGE_BODY_BYTES = 128 * 1024
"""What is larger is read on a thread: 10 MiB take a tenth of a second."""

_EVENT = {
    "type": "object",
    "description": "A server-sent event.",
    "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON, at last `[DONE]`."}},
    "required": ["data"],
}


class Endpoint(NamedTuple):
    """What answers a path of a client's API. `checks`: are called first, and raise what is refused."""

    call: Callable[..., Any]
    answer: type[BaseModel]
    streams: bool = False
    """It may be answered with server-sent events."""
    checks: tuple[Callable[..., Any], ...] = ()


class BoundedRequest(Request):
    """A request whose `json()` is what `RequestBounds.read` made of its body."""

    bounded: Any = None

    async def json(self) -> Any:
        """See Starlette's."""
        return self.bounded


def takes_body(scope: Scope) -> bool | None:
    """Whether a request's route takes a body; None: there is no such route."""
    app: FastAPI = scope["app"]
    for route in app.routes:
        if route.matches(scope)[0] is Match.FULL:
            return isinstance(route, APIRoute) and route.body_field is not None
    return None


class JsonRoute(APIRoute):
    """Reads a body within bounds, and answers 400 to one that vLLM's validators stumble over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for body in self.dependant.body_params:
            adapter = body._type_adapter
            adapter.validator = _ending_validator(_Body(body.field_info.annotation, repr(body), adapter.core_schema))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI's."""
        handle = super().get_route_handler()
        known = {field.alias for field in self.dependant.query_params}

        async def handle_bounded(request: Request) -> Response:
            if request.method == "GET":
                _require_known(request.query_params, known)
            bounded = BoundedRequest(request.scope, request.receive)
            if self.body_field is not None and (self.body_field.field_info.is_required() or await bounded.body()):
                _require_plain_json(request)
                bounds: RequestBounds = request.app.state.request_bounds
                body = await bounded.body()
                read = functools.partial(bounds.read, body, request.app.state.readings.get(self.path))
                bounded.bounded = await asyncio.to_thread(read) if len(body) > LARGE_BODY_BYTES else read()
            try:
                return await handle(bounded)
            except (AttributeError, LookupError, AssertionError, RecursionError) as error:
                # What is nested too deep is a client's, later too: the arguments of a tool call are JSON in a text.
                if current_request().parsed and not isinstance(error, RecursionError):
                    raise
                logger.info("vLLM cannot parse a body", exc_info=True)
                raise VLLMValidationError("The request body has a field of the wrong type.") from error

        return handle_bounded


@dataclass(frozen=True)
class _Body:
    """What a route takes, with pydantic's core schema of it."""

    kind: Any
    described: str
    schema: Any = field(compare=False)


@functools.lru_cache(maxsize=256)
def _ending_validator(body: _Body) -> SchemaValidator:
    """One for all routes that take the same, in all applications of a process."""
    return SchemaValidator(_ending_lists(body.schema), None, False)  # nothing prebuilt


def _ending_lists(schema: Any) -> Any:
    """A copy of pydantic's core schema in which a list, or an object of any names, ends at its first wrong entry."""
    if isinstance(schema, dict):
        ends = {"fail_fast": True} if schema.get("type") in ("list", "dict") else {}
        return {name: _ending_lists(one) for name, one in schema.items()} | ends
    return type(schema)(map(_ending_lists, schema)) if type(schema) in (list, tuple) else schema


def _require_known(query: Iterable[str], known: Collection[str]) -> None:
    """Raise for a parameter that would be ignored. Not of POST, where Anthropic's clients send `?beta=true`."""
    for name in query:
        if name not in known:
            has = f"It has {', '.join(f'`{each}`' for each in sorted(known))}." if known else "It has none."
            raise VLLMValidationError(f"`{name[:64]}` is no parameter of this route. {has}", parameter=name[:64])


def _require_plain_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise GracefulHTTPError(
            "The body must be JSON: send the header 'Content-Type: application/json'.",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise GracefulHTTPError("The body must not be compressed.", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Add a router's routes as they are. FastAPI's own way makes each again, for a third of an ingress's start."""
    app.router.routes.extend(router.routes)


def post_routes(endpoints: Mapping[str, Endpoint]) -> APIRouter:
    """Routes of POST, by path, which take JSON and validate no answer: vLLM makes those."""
    routes = APIRouter(route_class=JsonRoute)
    for path, endpoint in endpoints.items():
        success: dict[str, Any] = {"model": endpoint.answer, "description": "The answer."}
        if endpoint.streams:
            success["content"] = {"text/event-stream": {"schema": _EVENT}}
        routes.add_api_route(
            path,
            endpoint.call,
            methods=["POST"],
            dependencies=[Depends(check) for check in (validate_json_request, *endpoint.checks)],
            response_model=None,
            responses={HTTPStatus.OK.value: success},
        )
    return routes
