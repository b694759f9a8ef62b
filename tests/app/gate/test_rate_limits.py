"""Requests and tokens per minute: what is counted, what is given back, and what the client is told."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from fake_backend import FakeReplicas, fail_with
from ingress_server import CHAT, COMPLETION, settings_with, wait_until
from vllm.exceptions import VLLMValidationError

from app.gate.errors import OverloadedError
from app.gate.rates.limits import RateLimits, Spend, duration

KEYS = {"api_keys": {"key-a": "alice", "key-b": "bob"}}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def spend_of(tenant: str, clock: Clock, limits: RateLimits | None = None, **http: Any) -> Spend:
    limits = limits or RateLimits(settings_with(**KEYS, **http), clock=clock)
    rates = limits.of(tenant)
    assert rates is not None
    return Spend(limits, rates)


def test_nothing_is_limited_unless_it_is_set_and_a_tenants_own_limit_goes_before_the_general_one():
    assert RateLimits(settings_with(**KEYS)).of("alice") is None
    limits = RateLimits(
        settings_with(
            tenants={"alice": {"requests_per_minute": 3}, "bob": {"requests_per_minute": 0}},
            **KEYS,
            requests_per_minute=9,
        )
    )
    alice = limits.of("alice")
    assert alice is not None
    assert alice.headers(0)["x-ratelimit-limit-requests"] == "3"
    assert limits.of("bob") is None
    assert limits.of("stranger") is None


def test_what_was_reserved_and_not_used_comes_back_and_what_was_used_beyond_is_owed():
    clock = Clock()
    limits = RateLimits(settings_with(**KEYS, tokens_per_minute=600), clock=clock)
    first = spend_of("alice", clock, limits)
    first.reserve(100, 400)
    assert first.headers()["x-ratelimit-remaining-tokens"] == "100"
    first.use(130)
    first.settle()
    first.settle()
    assert first.headers()["x-ratelimit-remaining-tokens"] == "470"
    second = spend_of("alice", clock, limits)
    second.reserve(10, 0)
    second.use(10 + 520)
    second.settle()
    assert spend_of("alice", clock, limits).begin() is not None
    clock.now += 6.1  # 60 are owed, and 1 is needed
    assert spend_of("alice", clock, limits).begin() is None
    assert spend_of("bob", clock, limits).begin() is None


def test_what_can_never_fit_is_a_bad_request_and_what_does_not_fit_now_says_when():
    clock = Clock()
    limits = RateLimits(settings_with(**KEYS, tokens_per_minute=60), clock=clock)
    spend = spend_of("alice", clock, limits)
    with pytest.raises(VLLMValidationError, match="60 tokens per minute"):
        spend.reserve(50, 11)
    spend.reserve(50, 10)
    with pytest.raises(OverloadedError, match="try again in 30s"):
        spend.reserve(30, 0)
    assert spend.headers()["retry-after"] == "30"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0172, "18ms"), (0.12, "120ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s"),
        (61.25, "1m1.25s"), (3723, "1h2m3s"), (3600, "1h0m0s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_openai_does(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_request_beyond_the_limit_is_429_with_openais_headers_and_other_tenants_go_on(fresh: Any):
    server = fresh(clock=Clock(), **KEYS, requests_per_minute=2, max_queued_requests=8)
    with server.http(headers={"authorization": "Bearer key-a"}) as client:
        answers = [client.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        assert answers[0].headers["x-ratelimit-reset-requests"].endswith("s")
        assert answers[2].headers["retry-after"] == "30"
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert client.get("/v1/models").status_code == 429
        assert client.get("/health").status_code == 200
    assert server.client(api_key="key-b").chat.completions.create(**CHAT).choices
    with pytest.raises(openai.RateLimitError):
        server.client(api_key="key-a").chat.completions.create(**CHAT)
    assert len(server.replicas.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_counted_with_what_it_asks_for_and_at_the_end_with_what_it_got(fresh: Any, stream: bool):
    server = fresh(clock=Clock(), **KEYS, tokens_per_minute=1000)
    body = {**COMPLETION, "prompt": [5] * 100, "max_tokens": 300, "stream": stream}

    def left(client: Any) -> int:
        return int(client.get("/v1/models").headers["x-ratelimit-remaining-tokens"])

    with server.http(headers={"authorization": "Bearer key-a"}) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "600"
        wait_until(lambda: left(client) == 897)  # 100 of the prompt and 3 answered
        refused = client.post("/v1/completions", json={**body, "n": 4})
        assert refused.status_code == 400
        many = client.post("/v1/completions", json={**body, "prompt": [[5] * 100] * 3})
        assert many.status_code == 429
        assert int(many.headers["retry-after"]) >= 1
        wait_until(lambda: left(client) == 897)  # what the refused one had reserved is there again
    assert len(server.replicas.requests) == 1


def test_a_request_that_fails_costs_what_it_used(fresh: Any):
    failing = FakeReplicas(script=fail_with(RuntimeError("broken"), after_words=2))
    server = fresh(failing, clock=Clock(), **KEYS, tokens_per_minute=1000)
    with server.http(headers={"authorization": "Bearer key-a"}) as client:
        client.post("/v1/completions", json={**COMPLETION, "prompt": [5] * 100, "max_tokens": 400, "stream": True})
        wait_until(lambda: client.get("/v1/models").headers["x-ratelimit-remaining-tokens"] == "898")
