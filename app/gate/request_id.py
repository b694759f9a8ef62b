"""The id of a request: in the `x-request-id` header of its answer, in the answer's own id, and in the log.

A client's own is taken, if it is 1 to 256 printable characters (`body_limit` refuses others); else one is made. Ray
Serve does the same in front of the ingress, and writes the header itself: then it is not written twice.

Leans on Ray Serve 2.60: `ray.serve._private.http_util.RequestIdMiddleware` puts an id into the request's headers, and
appends that to the answer's. tests/end_to_end/metrics holds it.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.protocol.log_lines import FIELDS, REQUEST_ID

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
LONGEST_REQUEST_ID = 256  # bytes: vLLM repeats it in every event of a stream
LONGEST_ECHOED = 64
"""Characters of a client's id that go into the one that replicas know, for reading logs."""
_PRINTABLE = re.compile(rf"[!-~]{{1,{LONGEST_REQUEST_ID}}}")
_NO_PART_OF_NAMES = re.compile(r"[^!-~]|[/?#%\\]")
"""Would begin a line in a log, end a name in what a dying engine leaves behind, or be no one part of a URL's path: a
request with such an id could not be moved (`app.continuation.moves`)."""
_QUIET = frozenset({"/metrics", "/health"})
"""What is asked every few seconds is not logged while it is answered."""


def is_request_id(value: str) -> bool:
    """Whether a client may call its request so."""
    return _PRINTABLE.fullmatch(value) is not None


def for_names(value: str) -> str:
    """A client's id with `_` for whatever could not be in a log's line, a file's name and a URL's path."""
    return _NO_PART_OF_NAMES.sub("_", value)


class RequestIdMiddleware:
    """Gives every request its id, tells its client, and logs one line when it has ended (`http.log_format: json`)."""

    def __init__(self, app: ASGIApp, told_by_serve: bool, logs: bool) -> None:
        """`told_by_serve`: the header is written to the answer in front of this application; `logs`: each request."""
        self.app = app
        self.told_by_serve = told_by_serve
        self.logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if is_request_id(given) else uuid.uuid4().hex
        status, began = 499, time.monotonic()  # the client went away

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not (self.told_by_serve and given):
                    MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        token = REQUEST_ID.set(request_id)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if self.logs and not (scope["path"] in _QUIET and status < 400):
                self._log(scope, status, time.monotonic() - began)
            REQUEST_ID.reset(token)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        fields: dict[str, Any] = {"method": scope["method"], "path": scope["path"][:256], "status": status}
        logger.info("request ended", extra={FIELDS: {**fields, "seconds": round(seconds, 6)}})
