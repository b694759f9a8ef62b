"""Browsers' pages of other origins: which may read answers, and the preflight that asks so before the key is sent.

Off unless `http.cors_origins` names an origin. Credentials, which are cookies, are never allowed: a page sends its key
in a header of its own, as other clients do, so no page can use a key that it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from app.metrics.left_out import HEADER as LEFT_OUT

_RATES = [f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")]
EXPOSED = ("x-request-id", "request-id", "retry-after", LEFT_OUT, *_RATES)
"""Headers of an answer that a page may read, in addition to those that every page may."""
PREFLIGHT_S = 600


def cors(origins: Sequence[str]) -> list[Middleware]:
    """The middleware, to stand before the one that checks keys; none without origins."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_S,
        )
    ]
