"""Whatever a client sends: an answer in OpenAI's error shape with the right status, never a 500, and no harm done."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ingress_server import CHAT, COMPLETION, CONTEXT, Server

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
TOO_LONG = "x " * 2 * CONTEXT


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}}


DEEP_CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "[" * 50_000 + "]" * 50_000}}
BAD_CHAT: list[tuple[dict[str, Any], int]] = [
    ({"messages": []}, 400),
    ({"messages": None}, 400),
    ({"messages": "hello"}, 400),
    ({"messages": [{"content": "no role"}]}, 400),
    ({"messages": [{"role": "<|end|><|system|>", "content": "a"}]}, 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]}, 400),
    ({"messages": [{"role": "user", "content": TOO_LONG}]}, 400),
    ({"model": "no-such-model"}, 404),
    ({"model": 5}, 400),
    ({"model": "\ud800"}, 400),
    ({"max_tokens": -1}, 400),
    ({"max_tokens": 0}, 400),
    ({"max_tokens": "many"}, 400),
    ({"max_completion_tokens": -3}, 400),
    ({"temperature": -1}, 400),
    ({"temperature": float("nan")}, 400),
    ({"temperature": 1e400}, 400),
    ({"top_p": 0}, 400),
    ({"top_k": -5}, 400),
    ({"n": 0}, 400),
    ({"n": -5}, 400),
    ({"n": 129}, 400),
    ({"logprobs": True, "top_logprobs": 50}, 400),
    ({"logit_bias": {"99999999": 1}}, 400),
    ({"stop": [""]}, 400),
    ({"stop": ["a"] * 10}, 400),
    ({"seed": 2**70}, 400),
    ({"allowed_token_ids": []}, 400),
    ({"min_tokens": 100}, 400),
    ({"response_format": {"type": "nonsense"}}, 400),
    (schema({"type": "nonsense"}), 400),
    (schema({"type": "string", "pattern": "(("}), 400),
    (schema({"$ref": "#/nowhere"}), 400),
    ({"structured_outputs": {"regex": "(("}}, 400),
    ({"structured_outputs": {"grammar": "root ::= ("}}, 400),
    ({"structured_outputs": {"choice": []}}, 400),
    ({"structured_outputs": 5}, 400),
    ({"tools": [{"type": "function"}]}, 400),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
    ({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}, {"role": "user", "content": "Hi"}]}, 400),
    ({"cache_salt": ""}, 400),
    ({"cache_salt": "a/b"}, 400),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, 400),
    ({"vllm_xargs": {"kv_transfer_params": "x"}}, 400),
    ({"vllm_xargs": {"crosskv_hints": "x"}}, 400),
    ({"use_beam_search": True}, 400),
    ({"chat_template": "{{ 1/0 }}"}, 400),
    ({"stream_options": 5}, 400),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], int]] = [
    ({"prompt": ""}, 400),
    ({"prompt": None}, 400),
    ({"prompt": [10**10]}, 400),
    ({"prompt": [5] * CONTEXT}, 400),
    ({"prompt": TOO_LONG}, 400),
    ({"prompt": ["a"] * 2000}, 400),
    ({"prompt_embeds": "AAAA"}, 400),
    ({"suffix": "x"}, 400),
    ({"model": "no-such-model"}, 404),
    ({"max_tokens": -1}, 400),
    ({"logprobs": 50}, 400),
    ({"structured_outputs": {"regex": "(("}}, 400),
    ({"kv_transfer_params": {"a": 1}}, 400),
    ({"use_beam_search": True}, 400),
]


def check_error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None or isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= 400
    assert "pydantic" not in error["message"]
    assert "validation error" not in error["message"]
    assert "Traceback" not in error["message"]
    assert ".py" not in error["message"]
    return error


def post(server: Server, path: str, body: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with server.http() as client:
        return client.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("change", "status"), BAD_CHAT, ids=lambda value: str(value)[:40])
def test_bad_chat_request(server: Server, change: dict[str, Any], status: int, stream: bool):
    sent = len(server.replicas.requests)
    check_error(post(server, CHAT_PATH, {**CHAT, "stream": stream, **change}), status)
    assert len(server.replicas.requests) == sent, "a bad request must not reach a replica"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("change", "status"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_bad_completion_request(server: Server, change: dict[str, Any], status: int, stream: bool):
    sent = len(server.replicas.requests)
    check_error(post(server, COMPLETION_PATH, {**COMPLETION, "stream": stream, **change}), status)
    assert len(server.replicas.requests) == sent, "a bad request must not reach a replica"


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH, "/tokenize", "/detokenize", "/api/v1/kv/clear"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"model": ' + b"9" * 9000 + b"}", b"{}"],
    ids=lambda body: repr(body[:12]),
)
def test_malformed_json(server: Server, path: str, body: bytes):
    check_error(post(server, path, body), 400)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHAT_PATH, {"modalities": ["text", "audio"]}),
        (CHAT_PATH, {"audio": {"voice": "alloy", "format": "wav"}}),
        (CHAT_PATH, {"web_search_options": {}}),
        (CHAT_PATH, {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": " ?"}}),
        (CHAT_PATH, {"functions": [{"name": "f", "parameters": {}}]}),
        (CHAT_PATH, {"function_call": {"name": "f"}}),
        (CHAT_PATH, {"guided_json": {"type": "object"}}),
        (COMPLETION_PATH, {"guided_choice": ["a", "b"]}),
        (COMPLETION_PATH, {"best_of": 2}),
        ("/v1/responses", {"guided_regex": "[a-z]+", "input": "a"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_would_be_dropped_and_changes_the_answer_is_refused_by_name(server, path: str, change: dict[str, Any]):
    sent = len(server.replicas.requests)
    body = COMPLETION if path == COMPLETION_PATH else CHAT
    name = next(iter(change))
    error = check_error(post(server, path, {**body, **change}), 400)
    assert error["param"] == name
    assert f"`{name}`" in error["message"]
    assert len(server.replicas.requests) == sent


@pytest.mark.parametrize(
    "change",
    [
        {"modalities": ["text"], "audio": None, "web_search_options": None, "functions": [], "function_call": "none"},
        {"store": True, "service_tier": "auto", "prediction": {"type": "content", "content": "a"}, "verbosity": "low"},
        {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
    ],
)
def test_hints_that_cannot_change_an_answer_are_let_pass(server, change: dict[str, Any]):
    for body in (CHAT, {**CHAT, **change}):
        assert post(server, CHAT_PATH, body).status_code == 200
    plain, other = server.replicas.requests[-2:]
    assert other.prompt_token_ids == plain.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", lambda many: {"model": "demo", "input": [{"type": "x"}] * many}),
        (
            "/v1/responses",
            lambda many: {"model": "demo", "input": [{"role": "user", "content": [{"type": "input_text"}] * many}]},
        ),
        ("/api/v1/kv/pin", lambda many: {"tokens": [1.5] * many}),
        (CHAT_PATH, lambda many: {**CHAT, "documents": [{str(name): 5 for name in range(many)}]}),
    ],
    ids=["items", "parts", "tokens", "names"],
)
def test_of_many_wrong_entries_the_first_is_told(server: Server, path: str, body: Callable[[int], dict[str, Any]]):
    one, many = (check_error(post(server, path, body(number)), 400)["message"] for number in (1, 50))
    assert many.partition(":")[0] == one.partition(":")[0], "else a small body is millions of errors"


def test_malformed_messages_name_the_parameter_and_what_is_wrong(server: Server):
    error = check_error(post(server, CHAT_PATH, {**CHAT, "messages": []}), 400)
    assert error["param"] == "messages"
    error = check_error(post(server, CHAT_PATH, {**CHAT, "max_tokens": -1}), 400)
    assert "max_tokens must be at least 1" in error["message"]
    error = check_error(post(server, COMPLETION_PATH, {**COMPLETION, "prompt": TOO_LONG}), 400)
    assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/chat/completions/", "/redoc", "//"])
def test_unknown_path(server: Server, path: str):
    with server.http() as client:
        check_error(client.get(server.url + path), 404)  # else "//" is a host, and "/" its path


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT_PATH), ("DELETE", "/v1/models"), ("POST", "/health")])
def test_wrong_method(server: Server, method: str, path: str):
    with server.http() as client:
        answer = client.request(method, path)
    check_error(answer, 405)
    assert answer.headers["allow"]


def test_a_prompt_that_just_fits_is_answered(server: Server):
    answer = post(server, COMPLETION_PATH, {**COMPLETION, "prompt": [5] * (CONTEXT - 1)})
    assert answer.status_code == 200, answer.text


def test_after_all_that_the_server_still_answers(server: Server):
    assert post(server, CHAT_PATH, CHAT).json()["choices"][0]["message"]["content"] == " one two three"
    with server.http() as client:
        assert client.get("/health").json()["parts"]["ingress"] == {"state": "ok", "ongoing": 0, "waiting": 0}
