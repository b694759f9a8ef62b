"""`x-request-id`: the client's own or a new one, in the answer's header, in its id, and in every line of the log."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from fake_backend import FakeReplicas, fail_with
from ingress_server import CHAT, Server, wait_until
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from app.gate.request_id import RequestIdMiddleware
from deployments.protocol.log_lines import FIELDS, REQUEST_ID, set_up_log

_PACKAGES = ("app", "configs", "deployments", "kernels", "kvmanager", "vllm")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged as JSON."""
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in _PACKAGES}
    stream = io.StringIO()
    set_up_log("json", logging.StreamHandler(stream))
    yield stream
    for name, (handlers, level) in before.items():
        package = logging.getLogger(name)
        package.handlers, package.propagate = handlers, True
        package.setLevel(level)


def logged(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def ended(stream: io.StringIO) -> list[dict]:
    """The lines of requests."""
    return [one for one in logged(stream) if one["message"] == "request ended"]


def only_ended(stream: io.StringIO) -> dict:
    """The line of the only request, which is written a little after its client has the answer."""
    wait_until(lambda: ended(stream))
    (line,) = ended(stream)
    return line


def test_a_clients_own_id_comes_back_with_every_answer(server: Server) -> None:
    for path, status in (("/v1/chat/completions", 200), ("/nowhere", 404)):
        with server.http(headers={"X-Request-Id": "order-66"}) as http:
            answer = http.post(path, json=CHAT)
        assert answer.status_code == status
        assert answer.headers.get_list("x-request-id") == ["order-66"]


def test_the_answers_own_id_names_the_request(server: Server) -> None:
    with server.http(headers={"X-Request-Id": "order-67"}) as http:
        assert http.post("/v1/chat/completions", json=CHAT).json()["id"] == "chatcmpl-order-67"
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT)
        other = http.post("/v1/chat/completions", json=CHAT)
    assert answer.headers["x-request-id"] != other.headers["x-request-id"]


def test_a_stream_has_it_too(server: Server) -> None:
    headers = {"X-Request-Id": "order-72"}
    with (
        server.http(headers=headers) as http,
        http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
    ):
        text = answer.read().decode()
    assert f'"chatcmpl-{answer.headers["x-request-id"]}"' in text


@pytest.mark.parametrize(
    ("value", "status"),
    [(b"a b", 400), (b"x\xff", 400), (b'"quoted"\xe2\x80\xa8', 400), (b"x" * 256, 200), (b"x" * 257, 431)],
)
def test_what_is_no_id_is_refused_and_not_repeated(server: Server, value: bytes, status: int) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT, headers=[(b"x-request-id", value)])
    assert answer.status_code == status
    (told,) = answer.headers.get_list("x-request-id")
    assert (told == value.decode("latin-1")) == (status == 200)
    assert told.isascii()
    assert len(told) <= 256


@pytest.mark.parametrize("told_by_serve", [False, True])
def test_the_header_is_written_once(told_by_serve: bool) -> None:
    """Ray Serve appends it in front of the application."""

    async def echo(request) -> PlainTextResponse:
        return PlainTextResponse(request.headers["x-request-id"])

    app = Starlette(routes=[Route("/", echo)], middleware=[Middleware(RequestIdMiddleware, told_by_serve, False)])

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get("/", headers={"x-request-id": "mine"})

    answer = asyncio.run(ask())
    assert answer.text == "mine"
    assert answer.headers.get_list("x-request-id") == ([] if told_by_serve else ["mine"])


def test_each_request_is_a_line_with_its_id_and_no_text_of_it(start, lines: io.StringIO) -> None:
    server = start(log_format="json")
    with server.http(headers={"X-Request-Id": "order-68"}) as http:
        http.post("/v1/chat/completions", json=CHAT)
        http.get("/health")
    line = only_ended(lines)
    assert line["request_id"] == "order-68"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["seconds"] >= 0
    assert "red ball" not in lines.getvalue()


def test_a_defects_lines_name_its_request(start, lines: io.StringIO) -> None:
    server = start(FakeReplicas(script=fail_with(RuntimeError("a defect"))), log_format="json")
    with server.http(headers={"X-Request-Id": "order-69"}) as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code >= 500
    failures = [one for one in logged(lines) if one["level"] in ("ERROR", "WARNING")]
    assert failures
    assert {one["request_id"] for one in failures} == {"order-69"}
    assert any("a defect" in one.get("exception", "") for one in failures)


def test_a_path_begins_no_line_of_its_own(start, lines: io.StringIO) -> None:
    server = start(log_format="json")
    with server.http() as http:
        http.get("/a%0A%7B%22level%22:%22ERROR%22%7D")
    line = only_ended(lines)
    assert line["level"] == "INFO"
    assert line["path"].startswith("/a\n")


def test_what_ends_lines_or_commands_terminals_is_escaped(start, lines: io.StringIO) -> None:
    server = start(log_format="json")
    with server.http() as http:
        http.get("/a%E2%80%A8%C2%85%C2%9B2J")
    line = only_ended(lines)
    assert line["path"] == "/a\u2028\x85\x9b2J"
    assert lines.getvalue().isascii()


def test_without_the_setting_no_request_is_a_line(start, lines: io.StringIO) -> None:
    server = start()
    with server.http() as http:
        http.post("/v1/chat/completions", json=CHAT)
    assert ended(lines) == []


def test_a_line_is_one_object_whatever_is_in_it(lines: io.StringIO) -> None:
    token = REQUEST_ID.set("order-70")
    logging.getLogger("app.anything").warning("two\nlines of %s", "ünicode", extra={FIELDS: {"thing": object}})
    REQUEST_ID.reset(token)
    logging.getLogger("kvmanager.anything").info("outside")
    first, second = logged(lines)
    assert first["message"] == "two\nlines of ünicode"
    assert first["request_id"] == "order-70"
    assert "request_id" not in second
