"""Bodies that are being received have a sum, of all and of each tenant; a route that takes no body has none read."""

from __future__ import annotations

import contextlib
import socket
import tracemalloc
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from ingress_server import CHAT, Server, wait_until

from app import ingress
from app.gate.body_limit import FREE_BYTES, NoRoomError, OpenBodies
from load_tests.harness.patience import patience

MIB = 1024**2
NO_BODY = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/demo"),
    ("GET", "/api/v1/kv/stats"),
    ("GET", "/api/v1/kv/trie"),
    ("GET", "/api/v1/events"),
    ("GET", "/api/v1/settings"),
]


def test_a_tenant_has_its_part_and_all_have_the_sum():
    bodies = OpenBodies(4 * MIB, 1024)
    held = [bodies.open(tenant) for tenant in "abcde"]
    for body in held[:4]:
        body.has(MIB + FREE_BYTES)
        with pytest.raises(NoRoomError):
            body.has(MIB + FREE_BYTES + 1)
    held[4].has(FREE_BYTES)
    with pytest.raises(NoRoomError):
        held[4].has(FREE_BYTES + 1)
    assert bodies.nbytes == 4 * MIB
    for body in held:
        body.__exit__(None, None, None)
    assert bodies.nbytes == 0


def test_one_body_always_has_room():
    with OpenBodies(1024, 10 * MIB).open("a") as body:
        body.has(10 * MIB)


def test_what_is_received_byte_by_byte_counts_once():
    bodies = OpenBodies(4 * MIB, MIB)
    with bodies.open("a") as body:
        for length in range(0, FREE_BYTES + 100, 7):
            body.has(length)
        assert bodies.nbytes == length - FREE_BYTES
    assert bodies.nbytes == 0


@pytest.mark.parametrize(("method", "path"), NO_BODY)
@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_a_body_for_a_route_that_takes_none_is_refused_unread(server: Server, method: str, path: str, chunked: bool):
    with started(server, method, path, chunked) as connection:  # whose end never comes
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert f"{method} {path} takes no body.".encode() in answer


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/health", 405)])
def test_where_there_is_no_route_no_body_is_waited_for(server: Server, path: str, status: int):
    with started(server, "POST", path) as connection:
        assert received(connection).startswith(f"HTTP/1.1 {status} ".encode())


def test_an_empty_body_is_none(server: Server):
    with server.http() as client:
        assert client.get("/v1/models", headers={"content-length": "0"}).status_code == 200


def test_one_large_body_too_many_is_429_and_small_ones_are_served(start: Callable[..., Server], monkeypatch):
    monkeypatch.setattr(ingress, "OPEN_BODIES_BYTES", 1024)
    server = start(max_body_bytes=256 * 1024)
    large = {**CHAT, "unknown": "x" * 200_000}
    with started(server, "POST", "/tokenize", sent=200_000), server.http() as client:
        answer = None

        def is_refused() -> Any:
            nonlocal answer
            answer = client.post("/v1/chat/completions", json=large)
            return answer.status_code == 429

        wait_until(is_refused)  # the first one is on its way
        assert answer is not None
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    with server.http() as client:
        wait_until(lambda: client.post("/v1/chat/completions", json=large).status_code == 200)


def test_an_announced_body_takes_its_room_before_it_comes(start: Callable[..., Server], monkeypatch):
    monkeypatch.setattr(ingress, "OPEN_BODIES_BYTES", 1024)
    server = start(max_body_bytes=256 * 1024)
    with started(server, "POST", "/tokenize", sent=0, length=200_000), server.http() as client:
        wait_until(lambda: client.post("/tokenize", json={"prompt": "x" * 200_000}).status_code == 429)


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/v1/chat/completions"), ("POST", "/x")])
def test_thirty_open_bodies_of_nine_megabytes_take_little_memory(start: Callable[..., Server], method: str, path: str):
    server = start()
    tracemalloc.start()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                with contextlib.suppress(ConnectionError):  # refused before all is sent
                    stack.enter_context(started(server, method, path, sent=9_000_000))
            held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20 * MIB + 9_000_000, "of which the client's own copy is one"


@contextlib.contextmanager
def started(
    server: Server, method: str, path: str, chunked: bool = False, sent: int = 100, length: int | None = None
) -> Any:
    """A connection that has sent a request but for its body's end."""
    address = urlsplit(server.url)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    told = "transfer-encoding: chunked" if chunked else f"content-length: {length or sent + 1}"
    begun = f"{sent:x}\r\n".encode() if chunked else b""
    with socket.create_connection((address.hostname, address.port), timeout=patience(120)) as connection:
        connection.sendall(f"{head}{told}\r\n\r\n".encode() + begun)
        connection.sendall(b" " * sent)
        yield connection


def received(connection: socket.socket) -> bytes:
    """The head and what comes with it of an answer."""
    answer = b""
    while b"\r\n\r\n" not in answer or not answer.partition(b"\r\n\r\n")[2]:
        more = connection.recv(65536)
        if not more:
            break
        answer += more
    return answer
