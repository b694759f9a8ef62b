"""What `GET /` and the paths below `/page/` serve: the files of `static/`, read once, each under a path of its own.

No path is made of what a client sends, so none can lead out of the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


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
