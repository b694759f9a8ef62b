"""What `GET /` and the paths below `/page/` serve: the chat page with the live cache, for browsers.

The files of `static/` are read once, each under a path of its own: no path is made of what a client sends, so none can
lead out of the folder. They go out under headers that let the page load nothing from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"

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


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent. `tag`: its HTTP entity tag, made of its bytes."""

    body: bytes
    media_type: str
    tag: str


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def files_in(folder: Path) -> dict[str, PageFile]:
    """The files of a page, by path of the URL; what has no media type here, as editors leave it, is none."""
    known = (path for path in sorted(folder.iterdir()) if path.suffix in _MEDIA_TYPES)
    return {"/" if path.name == _INDEX else f"/page/{path.name}": _read(path) for path in known}


FILES: Mapping[str, PageFile] = files_in(_FOLDER)
"""By path of the URL."""

PATHS = frozenset(FILES)
"""Paths that need no key: the files hold no tenant's data, and the page asks for the key."""


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
