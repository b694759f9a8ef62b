"""What a request may hold is bounded before it is tokenized, hashed, validated, or kept in memory."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CHAT, COMPLETION, CONTEXT, MODEL
from vllm.exceptions import VLLMValidationError

from app import ingress
from app.gate import body_limit
from app.gate.auth import CALLER, Caller
from app.gate.body_limit import MOST_HEADER_BYTES, MOST_PATH_BYTES, BodyLimitMiddleware, OpenBodies
from app.gate.request_bounds import MOST_MESSAGES, RequestBounds
from load_tests.harness.patience import patience

TOO_MANY = [5] * (CONTEXT + 1)
TOO_LONG = "x " * 2 * CONTEXT


@pytest.mark.parametrize("order", ["pin", "unpin", "prefetch", "move"])
@pytest.mark.parametrize("prompt", [{"tokens": TOO_MANY}, {"text": TOO_LONG}], ids=["tokens", "text"])
def test_an_order_about_a_prompt_beyond_the_context_is_400_and_hashes_nothing(start, order: str, prompt):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    rest = {"prefetch": {"replica": 0}, "move": {"source": 0, "target": 1}}.get(order, {})
    with server.http() as client:
        answer = client.post(f"/api/v1/kv/{order}", json={**prompt, **rest})
    assert answer.status_code == 400, answer.text
    assert "context" in answer.json()["error"]["message"]
    assert control.orders == []


def test_a_lookup_beyond_the_context_is_400_and_hashes_nothing(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        for query in ({"tokens": ",".join(map(str, TOO_MANY))}, {"text": TOO_LONG}):
            answer = client.get("/api/v1/kv/lookup", params=query)
            assert answer.status_code == 400, answer.text
    assert control.looked_up == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TOO_LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/detokenize", {"tokens": TOO_MANY}),
        ("/v1/completions", {**COMPLETION, "prompt": [[5], TOO_MANY]}),
        ("/v1/completions", {**COMPLETION, "prompt": TOO_LONG * 50, "truncate_prompt_tokens": 5}),
        ("/v1/completions", {**COMPLETION, "logit_bias": {str(token): 1 for token in range(1025)}}),
        ("/v1/completions", {**COMPLETION, "bad_words": ["x" * 8193]}),
        ("/v1/chat/completions", {**CHAT, "bad_words": ["x" * 65] * 127}),
        ("/v1/chat/completions", {**CHAT, "stop": "x" * 8193}),
        ("/v1/messages", {**CHAT, "stop_sequences": ["x" * 4097] * 2}),
        ("/v1/chat/completions", {**CHAT, "x" * 1025: 1}),
        ("/api/v1/kv/pin", {"text": "x", "x" * 1025: 1}),
        ("/v1/completions", {**COMPLETION, "request_id": "x" * 257}),
        ("/v1/completions", {**COMPLETION, "request_id": "x\nERROR forged"}),
        ("/v1/responses", {"model": MODEL, "input": "Hi", "request_id": "x\x9b2J"}),
        ("/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * (MOST_MESSAGES + 1)}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * 129}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"x": "x" * 70_000}}),
        ("/v1/chat/completions", {**CHAT, "kv_cache": None, "x": [0] * 110_000}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_beyond_a_bound_is_400_on_every_route(server, path: str, body: dict[str, Any]):
    sent = len(server.replicas.requests)
    with server.http() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 2000
    assert len(server.replicas.requests) == sent


MESSAGES = {"messages": CHAT["messages"], "model": MODEL}
FORGED = {"prompt_token_ids": [5, 6, 7]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True, "echo": True}),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", {"model": MODEL, "input": "Hi"}),
        ("/v1/messages", CHAT),
        ("/v1/messages/count_tokens", MESSAGES),
        ("/tokenize", MESSAGES),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
def test_what_replicas_tell_each_other_no_client_says(server, path: str, body: dict[str, Any], field: str):
    sent = len(server.replicas.requests)
    with server.http() as client:
        answer = client.post(path, json={**body, field: FORGED})
        assert client.post(path, json={**body, field: None}).status_code == 200
        assert client.post(path, json={**body, field: {}}).status_code == 200
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"]
    assert [request for request in server.replicas.requests[sent:] if request.prompt_token_ids == [5, 6, 7]] == []


def test_stop_strings_and_bad_words_within_the_bounds_are_served(server):
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json={**CHAT, "stop": ["x" * 8000], "bad_words": ["x" * 60] * 128})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "text", "text": "a", "image_url": "http://127.0.0.1:9/x"},
        {"image_url": "http://127.0.0.1:9/x"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/x"}},
        {"type": ["text"]},
        {
            "type": "tool_result",
            "content": [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/x"}}],
        },
    ],
    ids=lambda part: str(part)[:40],
)
def test_content_that_is_no_text_is_refused_before_anybody_looks_at_it(part: dict[str, Any]):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(VLLMValidationError, match="text only"):
        RequestBounds(512, 8).check({"messages": messages}, 100)


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "text/plain"}, {}, {"content-type": "application/json", "content-encoding": "gzip"}],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/api/v1/kv/pin"])
def test_a_body_that_is_not_plain_json_is_415(server, path: str, headers: dict[str, str]):
    with server.http() as client:
        answer = client.post(path, content=b"{}", headers=headers)
    assert answer.status_code == 415, answer.text
    assert answer.json()["error"]["code"] is None


def test_a_target_or_headers_that_are_too_long_are_refused(server):
    with server.http() as client:
        assert client.get("/" + "x" * MOST_PATH_BYTES).status_code == 414
        assert client.get("/health", headers={"x": "x" * MOST_HEADER_BYTES}).status_code == 431
        assert client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "x" * 257}).status_code == 431


def test_a_body_whose_end_does_not_come_is_408(fresh, monkeypatch):
    monkeypatch.setattr(ingress, "BODY_TIMEOUT_S", 0.2)  # which an ingress reads when it is put together
    monkeypatch.setattr(body_limit, "LINGER_S", 0.2)
    server = fresh()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=patience(120)) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
        answer = b""
        while received := connection.recv(65536):
            answer += received
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"invalid_request_error"' in answer


def test_a_body_of_many_chunks_is_kept_as_one_message():
    seen = []

    async def app(scope, receive, send):
        seen.append(await receive())

    async def receive():
        return {"type": "http.request", "body": b"x", "more_body": next(left, 0) > 0}

    left = iter(range(5000, -1, -1))
    scope = {"type": "http", "headers": [], "query_string": b"", "raw_path": b"/", CALLER: Caller("")}
    bodies = OpenBodies(10_000, 10_000)
    limited = BodyLimitMiddleware(app, 10_000, 5.0, bodies, lambda scope: True)  # type: ignore[arg-type]
    asyncio.run(limited(scope, receive, None))  # type: ignore[arg-type]
    assert bodies.nbytes == 0
    assert seen == [{"type": "http.request", "body": b"x" * 5001, "more_body": False}]
