"""API keys: who asks, and on behalf of which tenant."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import error_response

OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/docs"})
"""Probes and scrapers carry no key, and these paths tell nothing about anybody's prompts."""

TENANT = "crosskv.tenant"
"""Key of the tenant's name in an ASGI scope."""


class ApiKeys:
    """Maps a key to its tenant in time that does not depend on how much of the key is right."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """`tenants` maps key to tenant; empty means that everybody may ask, as the tenant ''."""
        self._tenants = [(hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in tenants.items()]

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant that an `Authorization` header speaks for; None when it speaks for nobody."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, tenant in self._tenants:
            if secrets.compare_digest(known, digest):
                found = tenant
        return found if scheme.lower() == "bearer" else None


class AuthMiddleware:
    """Answers 401 to a missing or wrong key; otherwise writes the tenant into the scope."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        tenant = self.keys.tenant(Headers(scope=scope).get("authorization"))
        if tenant is None:
            refusal = error_response(
                HTTPStatus.UNAUTHORIZED,
                "A valid API key is needed: send the header 'Authorization: Bearer YOUR_KEY'.",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        scope[TENANT] = tenant
        await self.app(scope, receive, send)
