"""What failing replicas raise, and clients that leave: for tests of what the others see of it."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import ray.exceptions
from ingress_server import wait_until
from ray.core.generated.common_pb2 import ActorDiedErrorContext

SECRET = "/srv/secret/engine.py"


def through_ray(cause: Exception) -> Exception:
    """As Ray raises in the caller what a method of an actor raised."""
    error = ray.exceptions.RayTaskError("generate", f'Traceback: File "{SECRET}"', cause, proctitle="x", pid=1, ip="1")
    return error.as_instanceof_cause()


STOPPED = ray.exceptions.ActorDiedError(
    ActorDiedErrorContext(error_message="The actor is dead because it was killed by `ray.kill`.", actor_id=bytes(16))
)


def send(url: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """Send a request and do not wait for its answer."""
    target = httpx.URL(url)
    content = json.dumps(body).encode()
    connection = socket.create_connection((target.host, target.port or 80))
    headers = f"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def parts(server) -> dict[str, Any]:
    with server.http() as client:
        return client.get("/health").json()["parts"]["ingress"]


def leave(url: str, body: dict[str, Any], until, path: str = "/v1/chat/completions") -> None:
    connection = send(url, body, path)
    wait_until(until)
    connection.close()


def check_all_is_free(server) -> None:
    wait_until(lambda: parts(server) == {"state": "ok", "ongoing": 0, "waiting": 0})
