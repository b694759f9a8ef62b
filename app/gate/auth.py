"""API keys: who asks, on behalf of which tenant, and whether as an administrator.

Where keys are configured, a key decides, wherever the request comes from. Where none are, all callers are the one
tenant, and only this machine itself is an administrator: the server must be bound to loopback, the request must come
from there, and nothing in it may say that it was forwarded (`from_this_machine`). Any request to such a server must
name it as it is called (`is_called`): a web page whose name leads to this machine names itself.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import GracefulHTTPError

from app.gate.bound_host import is_loopback
from app.gate.errors import error_response
from app.page.files import PATHS as PAGE
from configs.secret.api_keys import DIGEST_PREFIX, FARTHEST_PRIORITY, ApiKey, key_digest

HEALTH, METRICS = "/health", "/metrics"
OPEN_PATHS = frozenset({HEALTH, METRICS, "/openapi.json", "/docs"}) | PAGE
"""Paths that need no tenant's key. Probes hear no more than whether the server serves; /metrics has keys of its own;
the page's files hold no tenant's data."""

CALLER = "crosskv.caller"
"""Key of the `Caller` in an ASGI scope."""

_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_KEY_NEEDED = (
    "A valid API key is needed: send the header 'Authorization: Bearer YOUR_KEY', or 'x-api-key: YOUR_KEY' as "
    "Anthropic's clients do."
)

WHO_IS_ADMINISTRATOR = (
    "That is a key with `admin: true`, or, where there are no keys, the server's own machine while it is bound to "
    "loopback."
)

_WRONG_HOST = (
    "The header Host names another server. Without keys this one is called by a loopback address or by a name in "
    "http.host_names; set that, or http.api_keys."
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    tenant: str
    """Empty where there are no keys."""
    admin: bool = False
    first_priority: int = 0
    """The least priority that it may ask for, which is the one that goes first."""

    def priority(self, asked: int) -> int:
        """Clamp the `priority` of its request's body: engines compute lower numbers first.

        A tenant's is at least `first_priority`. An administrator's is bounded only by what an engine's messages carry.
        """
        least = -FARTHEST_PRIORITY if self.admin else self.first_priority
        return min(max(asked, least), FARTHEST_PRIORITY)


class ForbiddenError(GracefulHTTPError):
    """The caller is known, and may not do this: 403."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.FORBIDDEN)


def require_admin(caller: Caller) -> None:
    """Raise `ForbiddenError` for a caller that may see and change only its own."""
    if not caller.admin:
        raise ForbiddenError(f"Only an administrator may do this. {WHO_IS_ADMINISTRATOR}")


def require_owner(caller: Caller) -> None:
    """Raise `ForbiddenError` for a caller that owns nothing here: a stranger to a server without keys."""
    if not caller.tenant:
        require_admin(caller)


class ApiKeys:
    """Maps a key to its caller, in time that does not depend on how much of the key is right."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        """`keys`: by digest (`HTTPSettings.keys`); empty means that any caller may ask, as the tenant ''."""
        self._callers = [
            (_raw(digest), Caller(whom.tenant, whom.admin, whom.priority)) for digest, whom in keys.items()
        ]

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, authorization: str | None) -> Caller | None:
        """Return the caller that an `Authorization` header names; None without a known key."""
        digest, found = _digest_of(authorization), None
        for known, caller in self._callers:
            if secrets.compare_digest(known, digest):
                found = caller
        return found if _is_bearer(authorization) else None


class AuthMiddleware:
    """Answers 401 to a missing or wrong key, 403 to one that may not read /metrics; else writes the caller into the
    scope."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        metrics_key: str | None,
        loopback: bool,
        count_refusal: Callable[[str], None] = lambda reason: None,
        host_names: Collection[str] = (),
    ) -> None:
        """`metrics_key`, `host_names`: as in the settings; `loopback`: the server is bound to it; `count_refusal`: by
        reason."""
        self.app = app
        self.keys = keys
        self.metrics_key = None if metrics_key is None else _raw(key_digest(metrics_key))
        self.loopback = loopback
        self.count_refusal = count_refusal
        self.host_names = frozenset(host_names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route here speaks anything else, and nothing checks its key
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        if not self.keys and not is_called(headers, self.host_names, by_address=not self.loopback):
            self.count_refusal("forbidden")
            await error_response(HTTPStatus.FORBIDDEN, _WRONG_HOST, param="Host")(scope, receive, send)
            return
        caller = self._caller(scope, headers)
        path = route_path(scope)
        if path == METRICS and not (caller is not None and caller.admin) and not self._opens_metrics(headers):
            caller_is_known = caller is not None and (caller.tenant or not self.keys)
            await self._refuse_metrics(bool(caller_is_known), scope, receive, send)
            return
        if caller is None and path not in OPEN_PATHS:
            self.count_refusal("no_key")
            refusal = error_response(HTTPStatus.UNAUTHORIZED, _KEY_NEEDED, headers={"www-authenticate": "Bearer"})
            await refusal(scope, receive, send)
            return
        scope[CALLER] = caller or Caller("")
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope, headers: Headers) -> Caller | None:
        if self.keys:
            return self.keys.caller(_authorization(headers))
        return Caller("", admin=self.loopback and from_this_machine(scope, headers))

    def _opens_metrics(self, headers: Headers) -> bool:
        authorization = headers.get("authorization")
        right = secrets.compare_digest(self.metrics_key or b"", _digest_of(authorization))
        return right and _is_bearer(authorization)

    async def _refuse_metrics(self, caller_is_known: bool, scope: Scope, receive: Receive, send: Send) -> None:
        self.count_refusal("forbidden" if caller_is_known else "no_key")
        if caller_is_known:
            refusal = error_response(
                HTTPStatus.FORBIDDEN,
                "The metrics are about all tenants: set http.metrics_key and send it as 'Authorization: Bearer …', or "
                "send an administrator's key.",
            )
        else:
            refusal = error_response(HTTPStatus.UNAUTHORIZED, _KEY_NEEDED, headers={"www-authenticate": "Bearer"})
        await refusal(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path of a request below the application's route prefix."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def is_called(headers: Headers, names: Collection[str], by_address: bool) -> bool:
    """Whether a request's `Host` is loopback or one of `names`; `by_address`: any address will do, which no page has.

    A request without one was sent by no browser.
    """
    given = headers.getlist("host")
    hosts = [None if "@" in one else _host_of(f"//{one}") for one in given]
    return all(is_loopback(one) or one in names or (by_address and _is_address(one)) for one in hosts)


def _is_address(host: str | None) -> bool:
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return True


def from_this_machine(scope: Scope, headers: Headers) -> bool:
    """Whether a request was sent by a user of this machine.

    Its peer is a loopback address. No header says that it was forwarded: headers can only take this right away. It was
    not sent by a browser for a page of another site: `Host` and `Origin` name this machine. A page's picture or script
    names no `Origin`; `Sec-Fetch-Site` says which site it belongs to.
    """
    client = scope.get("client")
    if not client or not is_loopback(str(client[0])):
        return False
    if any(name in headers for name in _FORWARDED):
        return False
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_host_of(origin)):
        return False
    if origin is None and headers.get("sec-fetch-site") == "cross-site":
        return False
    return is_loopback(_host_of(f"//{headers.get('host', '')}"))


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _authorization(headers: Headers) -> str | None:
    """What the request gives as its key: `Authorization` where there is one, else Anthropic's `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


def _is_bearer(authorization: str | None) -> bool:
    return (authorization or "").partition(" ")[0].lower() == "bearer"


def _digest_of(authorization: str | None) -> bytes:
    key = (authorization or "").partition(" ")[2]
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()


def _raw(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix(DIGEST_PREFIX))
