"""Who may ask what: keys, tenants, the salts made of them, the replica pin, and the limit on bodies."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CHAT, COMPLETION, FINGERPRINT, SECRET, settings_with

from app.gate import body_limit
from app.gate.auth import ApiKeys, Caller
from app.openai.prompt_keys import PromptKeys
from kvmanager.segments import keys
from load_tests.harness.patience import patience

TENANTS = {"key-a": "alice", "key-b": "bob"}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic key-a", "key-a", "Bearer key-a2"])
def test_a_missing_or_wrong_key_is_401(start, header: str | None):
    server = start(api_keys=TENANTS)
    headers = {} if header is None else {"authorization": header}
    with server.http(headers=headers) as client:
        for method, path in [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/api/v1/kv/stats")]:
            answer = client.request(method, path, json=CHAT)
            assert answer.status_code == 401
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["www-authenticate"] == "Bearer"
    assert not server.replicas.requests


def test_a_right_key_is_let_in_and_probes_need_none(start):
    server = start(api_keys=TENANTS)
    assert server.client(api_key="key-b").chat.completions.create(**CHAT).choices
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="key-c").models.list()
    with server.http() as client:
        assert client.get("/health").status_code == 200


def test_a_key_is_found_in_either_case_of_the_scheme_and_plain_or_as_a_digest(start):
    digest = f"sha256:{hashlib.sha256(b'key-a').hexdigest()}"
    keys = ApiKeys(settings_with(api_keys={digest: "alice", "key-o": {"tenant": "ops", "admin": True}}).http.keys)
    assert keys.caller("bearer key-a") == Caller("alice")
    assert keys.caller("Bearer key-o") == Caller("ops", admin=True)
    assert keys.caller(f"Bearer {digest}") is None, "a digest is no key"


def test_tenants_and_their_own_salts_share_no_key(start):
    server = start(api_keys=TENANTS)
    prompt = {**COMPLETION, "prompt": [5] * 100}
    asked = [("key-a", None), ("key-b", None), ("key-a", "x"), ("key-b", "x"), ("key-a", None)]
    for key, salt in asked:
        server.client(api_key=key).completions.create(**prompt, extra_body={"cache_salt": salt} if salt else None)
    salts = [request.cache_salt for request in server.replicas.requests]
    hashes = [tuple(request.block_hashes) for request in server.replicas.requests]
    assert salts[0] == salts[4]
    assert hashes[0] == hashes[4]
    assert len(set(salts)) == 4
    assert len({one for several in hashes for one in several}) == 4 * 3


def test_a_request_carries_the_hashes_of_its_full_blocks(start):
    server = start()
    server.client().completions.create(**{**COMPLETION, "prompt": [5] * 100})
    (request,) = server.replicas.requests
    assert request.cache_salt == keys.cache_salt(SECRET, FINGERPRINT, "\0", "exact")
    assert request.block_hashes == keys.block_hashes([5] * 100, 32, request.cache_salt)
    assert len(request.block_hashes) == 3


def test_tenant_and_salt_cannot_be_mistaken_for_another_pair():
    made = PromptKeys(SECRET, FINGERPRINT, 32)
    assert made.salt("alice", "bob") != made.salt("alicebob", None)
    assert made.salt("alice", "bob") != made.salt("alice\0bob", None)
    assert PromptKeys(SECRET, bytes(32), 32).salt("alice", None) != made.salt("alice", None)


def test_a_tenant_looks_up_its_own_keys_only(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control), api_keys=TENANTS)
    for key in ("key-a", "key-b", "key-a"):
        with server.http(headers={"authorization": f"Bearer {key}"}) as client:
            assert client.get("/api/v1/kv/lookup", params={"tokens": ",".join(["5"] * 64)}).status_code == 200
    first, second, third = control.looked_up
    assert first == third
    assert not set(first) & set(second)


def test_a_pin_of_an_administrator_is_obeyed(start):
    server = start(FakeReplicas(known_ranks={0, 1}))
    with server.http() as client:
        assert client.post("/v1/chat/completions", json=CHAT, headers={"X-CrossKV-Replica": "1"}).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        for wrong in ("2", "-1", "one", "", "99999999", "1.0", "²"):
            headers = {"X-CrossKV-Replica": wrong.encode("latin-1")}
            answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 400, wrong
            assert "replica" in answer.json()["error"]["message"].lower()
    assert [request.replica_pin for request in server.replicas.requests] == [1, None]


def test_another_callers_pin_is_refused(start):
    server = start(loopback=False)
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json=CHAT, headers={"X-CrossKV-Replica": "0"})
    assert answer.status_code == 400
    assert "administrators" in answer.json()["error"]["message"]


ROUTES = ["/health", "/docs", "/openapi.json", "/", "/v1/models", "/metrics", "/api/v1/kv/stats", "/nowhere"]
ELSEWHERE = ["rebound.example", "rebound.example:8000", "127.0.0.1.example", "localhost@rebound.example", "", "[::1"]


@pytest.mark.parametrize("host", [*ELSEWHERE, "10.0.0.1", "llm.example.org.evil.example"])
def test_without_keys_a_server_of_loopback_answers_to_no_other_name(start, host: str):
    server = start(host_names=["llm.example.org"])
    with server.http(headers={"host": host}) as client:
        answers = [client.get(path) for path in ROUTES] + [client.post("/v1/chat/completions", json=CHAT)]
    assert {answer.status_code for answer in answers} == {403}
    assert "http.host_names" in answers[0].json()["error"]["message"]
    assert not server.replicas.requests


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:80", "llm.example.org", "LLM.example.org:443"])
def test_without_keys_a_server_answers_to_loopback_and_to_its_own_names(start, host: str):
    with start(host_names=["llm.example.org"]).http(headers={"host": host}) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.get("/health").status_code == 200


def test_a_server_beyond_loopback_answers_to_addresses_too_and_one_with_keys_to_any_name(start):
    with start(loopback=False).http() as client:
        for host, status in (("10.0.0.1:8000", 200), ("[fd00::1]", 200), ("rebound.example", 403)):
            assert client.post("/v1/chat/completions", json=CHAT, headers={"host": host}).status_code == status
    with start(api_keys=TENANTS).http(headers={"host": "llm.example.org", "authorization": "Bearer key-a"}) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


LIMIT = 2048


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/api/v1/kv/clear"])
@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_a_body_over_the_limit_is_413(start, path: str, chunked: bool):
    def chunks() -> Iterator[bytes]:
        for _ in range(3):
            yield b" " * (LIMIT // 2)

    server = start(max_body_bytes=LIMIT)
    content = chunks() if chunked else b" " * (LIMIT + 1)
    with server.http() as client:
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert str(LIMIT) in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["key-a", "no key"])
@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_a_client_that_is_refused_while_it_sends_gets_its_answer(start, chunked: bool, key: str):
    """A connection that is closed on bytes that were not read is reset, and what the client was sent is lost."""
    address = urlsplit(start(max_body_bytes=LIMIT, api_keys=TENANTS).url)
    body = b" " * 2**24  # more than the system keeps for the two
    how = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %s\r\n%s\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=patience(120)) as connection:
        connection.sendall(head % (key.encode(), how))
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
    assert (answer.status, set(error)) == (413 if key in TENANTS else 401, {"message", "type", "param", "code"})


def test_a_client_that_is_refused_and_sends_no_more_does_not_keep_its_connection(start, monkeypatch):
    monkeypatch.setattr(body_limit, "LINGER_S", 0.2)
    address = urlsplit(start(max_body_bytes=LIMIT).url)
    with socket.create_connection((address.hostname, address.port), timeout=patience(120)) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9999999\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_a_body_of_exactly_the_limit_is_read(start, chunked: bool):
    body = b'{"prompt": "hello"}'.ljust(LIMIT)
    server = start(max_body_bytes=LIMIT)
    with server.http() as client:
        content = iter([body[:1000], body[1000:]]) if chunked else body
        answer = client.post("/tokenize", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200
