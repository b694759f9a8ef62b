"""Routes that take a JSON body: it is read once, within bounds, before FastAPI and vLLM validate it.

Where it may be left out, no body is none, whatever the headers say. The bounds are in `app.state.request_bounds`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from app.gate.request_bounds import RequestBounds
from app.gate.request_context import current_request

logger = logging.getLogger(__name__)


class BoundedRequest(Request):
    """A request whose `json()` is what `RequestBounds.read` made of its body."""

    bounded: Any = None

    async def json(self) -> Any:
        """See Starlette's."""
        return self.bounded


class JsonRoute(APIRoute):
    """Reads a body within bounds, and answers 400 to one that vLLM's validators stumble over."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI's."""
        handle = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            bounded = BoundedRequest(request.scope, request.receive)
            if self.body_field is not None and (self.body_field.field_info.is_required() or await bounded.body()):
                _require_plain_json(request)
                bounds: RequestBounds = request.app.state.request_bounds
                bounded.bounded = bounds.read(await bounded.body())
            try:
                return await handle(bounded)
            except (AttributeError, LookupError, AssertionError, RecursionError) as error:
                if current_request().parsed:
                    raise
                logger.info("vLLM cannot parse a body", exc_info=True)
                raise VLLMValidationError("The request body has a field of the wrong type.") from error

        return handle_bounded


def _require_plain_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise GracefulHTTPError(
            "The body must be JSON: send the header 'Content-Type: application/json'.",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise GracefulHTTPError("The body must not be compressed.", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
