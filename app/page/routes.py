"""GET / : the chat page with the live cache, as plain files under headers that let it load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.page.files import FILES, PageFile

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # The browser itself refuses innerHTML and its like: what a model answers cannot become markup by a slip.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # ask each time: an upgraded server has no page of the old one
}
"""Of every file of the page."""


def page_router() -> APIRouter:
    """The page's files. None is in the API's description: they are for browsers."""
    router = APIRouter()
    for path, file in FILES.items():
        router.add_api_route(path, _sender(file), methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _sender(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "etag": file.tag}

    async def send(request: Request) -> Response:
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=HTTPStatus.NOT_MODIFIED.value, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    return send
