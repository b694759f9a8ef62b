"""Pages of other origins: what a browser would let them do."""

from __future__ import annotations

import httpx
import pytest
from fake_backend import FakeReplicas, fail_with
from ingress_server import CHAT

PAGE = "https://chat.example.org"
KEYS = {"key-a": "alice"}
CHATS = "/v1/chat/completions"


def preflight(client: httpx.Client, path: str, origin: str = PAGE, method: str = "POST") -> httpx.Response:
    asked = {"access-control-request-method": method, "access-control-request-headers": "authorization,content-type"}
    return client.options(path, headers={"origin": origin, **asked})


def allowed(answer: httpx.Response) -> str | None:
    return answer.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("path", [CHATS, "/v1/responses", "/v1/messages", "/api/v1/kv/stats", "/v1/nothing"])
def test_a_preflight_is_answered_before_a_key_is_asked_for(start, path: str):
    server = start(api_keys=KEYS, cors_origins=[PAGE])
    with server.http() as client:
        answer = preflight(client, path)
    assert answer.status_code == 200
    assert allowed(answer) == PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_a_page_reads_answers_errors_and_the_headers_that_it_needs(start):
    server = start(api_keys=KEYS, cors_origins=[PAGE, "http://localhost:3000"])
    with server.http(headers={"origin": PAGE}) as client:
        refused = client.post(CHATS, json=CHAT)
        answer = client.post(CHATS, json=CHAT, headers={"authorization": "Bearer key-a"})
        wrong = client.post("/v1/messages", json={}, headers={"x-api-key": "key-a"})
    assert [one.status_code for one in (refused, answer, wrong)] == [401, 200, 400]
    for one in (refused, answer, wrong):
        assert allowed(one) == PAGE
        assert {"x-request-id", "retry-after"} <= set(one.headers["access-control-expose-headers"].split(", "))
        assert "access-control-allow-credentials" not in one.headers


def test_a_page_reads_what_failed_too(start):
    server = start(FakeReplicas(fail_with(RuntimeError("boom"))), cors_origins=[PAGE])
    with server.http(headers={"origin": PAGE}) as client:
        answer = client.post(CHATS, json=CHAT)
    assert answer.status_code == 500
    assert allowed(answer) == PAGE


def test_other_pages_are_allowed_nothing(start):
    server = start(api_keys=KEYS, cors_origins=[PAGE])
    with server.http() as client:
        for origin in ("https://evil.example.org", "null", f"{PAGE}.evil.org", "http://chat.example.org"):
            assert allowed(preflight(client, CHATS, origin)) is None
            asked = {"origin": origin, "authorization": "Bearer key-a"}
            assert allowed(client.post(CHATS, json=CHAT, headers=asked)) is None
        assert preflight(client, CHATS, method="DELETE").status_code == 400


def test_every_page_is_allowed_without_cookies_where_that_is_said(start):
    server = start(api_keys=KEYS, cors_origins=["*"])
    with server.http(headers={"cookie": "a=b"}) as client:
        answer = preflight(client, CHATS, "https://anybody.org")
    assert allowed(answer) == "*"
    assert "access-control-allow-credentials" not in answer.headers


def test_nothing_is_allowed_by_default(start):
    server = start(api_keys=KEYS)
    with server.http() as client:
        answer = preflight(client, CHATS)
        assert answer.status_code == 401
        assert not [name for name in answer.headers if name.startswith("access-control")]
