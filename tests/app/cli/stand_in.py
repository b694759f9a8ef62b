"""A server that answers what a real one answered once, or what a test wants.

`recorded/` is of the demo model on two replicas, after 39 prompts; of /metrics the families that the commands read.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

RECORDED = Path(__file__).with_name("recorded")


def recorded(name: str) -> Any:
    """An answer as it was, parsed."""
    return json.loads((RECORDED / f"{name}.json").read_text())


def error(message: str, status: int) -> tuple[int, Any]:
    """A refusal in OpenAI's shape."""
    return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


@dataclass
class StandIn:
    """`answers`: by path, a status and a body: text, or what JSON is made of. `requests`: what came."""

    url: str = ""
    answers: dict[str, tuple[int, Any]] = field(
        default_factory=lambda: {
            "/health": (200, recorded("health")),
            "/metrics": (200, (RECORDED / "metrics.txt").read_text()),
            "/api/v1/kv/stats": (200, recorded("stats")),
            "/api/v1/kv/lookup": (200, recorded("lookup")),
            "/api/v1/kv/pin": (200, recorded("pin")),
            "/api/v1/kv/unpin": (200, {"segments": 0, "bytes": 0}),
            "/api/v1/kv/clear": (200, recorded("clear")),
        }
    )
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, Any, str | None]] = field(default_factory=list)
    """Path, parameters or body, and the `Authorization` header."""

    def sent(self, path: str) -> Any:
        """What the one request to this path carried."""
        (found,) = [content for where, content, _ in self.requests if where == path]
        return found


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_GET(self) -> None:
        self._answer(dict(parse_qs(urlsplit(self.path).query)))

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, content: Any) -> None:
        path = urlsplit(self.path).path
        self.stand_in.requests.append((path, content, self.headers["Authorization"]))
        status, body = self.stand_in.answers.get(path, error("Not Found", 404))
        text = (body if isinstance(body, str) else json.dumps(body)).encode("utf-8", "surrogatepass")
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **self.stand_in.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def stand_in_server() -> Iterator[StandIn]:
    """Serve a `StandIn` on a free port, on threads of its own."""
    stand_in = StandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (_Handler,), {"stand_in": stand_in}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
