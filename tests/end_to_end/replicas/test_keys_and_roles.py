"""A server with keys, whose replicas have roles and whose engines processes of their own: tenants share nothing, and a
handover changes no token."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from load_tests.harness.patience import patience

sys.path.insert(0, str(Path(__file__).parents[1]))  # for modules that are no tests

import httpx
import pytest
from keys import (
    COLLECTORS_PASSWORD,
    FOREIGN_KEY,
    HUB_TOKEN,
    METRICS_KEY,
    OPERATOR_KEY,
    SERVER_SECRET,
    TENANT_KEYS,
    exposing,
)

from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.8, "repetition_penalty": 1.1},
    "held back": {"stop": ["a stop string that never comes"]},
    "structured": {"structured_outputs": {"regex": "([a-z]{3} [0-9]{2};){6}"}, "ignore_eos": False},
    "least": {"min_tokens": 20, "ignore_eos": False},
}
ANSWER_TOKENS = 24
ENGINE = "VLLM::EngineCore"


@dataclass
class Answer:
    """All that a client sees of one stream."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int = 0
    replica: str = ""


def asked() -> list[tuple[list[int], dict[str, Any]]]:
    rng = Random(23)
    lengths = [rng.randrange(90, 400) for _ in KINDS] + [rng.randrange(600, 900)]  # the last in two steps
    prompts = [[rng.randrange(100, 500) for _ in range(length)] for length in lengths]
    return list(zip(prompts, [*KINDS.values(), {}], strict=True))


def ask(server: RunningServer, prompt: list[int], more: dict[str, Any], **headers: str) -> Answer:
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **more,
    }  # fmt: skip
    answer = Answer()
    headers |= {"Authorization": f"Bearer {OPERATOR_KEY}"}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=patience(120)
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event.get("usage"):
                answer.completion_tokens = event["usage"]["completion_tokens"]
                answer.replica = event["usage"]["kv_cache"]["replica"]
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.tokens += choice.get("token_ids") or []
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                if choice.get("logprobs"):
                    answer.logprobs += choice["logprobs"]["token_logprobs"]
    return answer


def ask_all(server: RunningServer, salt: str, **headers: str) -> list[Answer]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda one: ask(server, one[0], {**one[1], "cache_salt": salt}, **headers), asked()))


def roles(server: RunningServer) -> dict[str, str]:
    found: dict[str, str] = server.stats()["roles"]
    return found


def both(server: RunningServer) -> bool:
    return sorted(roles(server).values()) == ["decode", "prefill"]


def seen(answers: list[Answer]) -> list[tuple[Any, ...]]:
    return [(one.text, one.tokens, one.logprobs, one.finish_reason, one.completion_tokens) for one in answers]


def completion(server: RunningServer, key: str, tokens: list[int]) -> httpx.Response:
    body = {"model": "demo", "prompt": tokens, "max_tokens": 2, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=patience(60))


def test_a_tenant_has_its_own_limit_wherever_its_key_comes_from(keyed: RunningServer) -> None:
    answers = [completion(keyed, key, [101, 102, 103]) for key in (FOREIGN_KEY, TENANT_KEYS["alpha"])]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.headers.get("x-ratelimit-limit-requests") for answer in answers] == ["1000", None]
    shown = get(keyed, OPERATOR_KEY, "/api/v1/settings").json()["settings"]["tenants"]
    assert (shown["gamma"]["cpu_bytes"], shown["alpha"]["weight"]) == (64 * 1024**2, 2.0)


def test_tenants_share_no_kv_and_steer_nothing_but_their_own(keyed: RunningServer) -> None:
    rng = Random(29)
    document = [rng.randrange(100, 500) for _ in range(700)]

    def reused(tenant: str) -> int:
        answer = completion(keyed, TENANT_KEYS[tenant], document)
        assert answer.status_code == 200, answer.text
        kv = answer.json()["usage"]["kv_cache"]
        return len(document) - int(kv["recomputed"])

    def known(tenant: str) -> int:
        tokens = ",".join(map(str, document))
        return int(get(keyed, TENANT_KEYS[tenant], f"/api/v1/kv/lookup?tokens={tokens}").json()["cpu"])

    assert [completion(keyed, key, document).status_code for key in ("", "another-key")] == [401, 401]
    assert reused("alpha") == 0
    keyed.wait_until(lambda: known("alpha") > 16, "it is in the CPU tier")
    assert (reused("alpha") > 512, known("beta"), reused("beta")) == (True, 0, 0)
    keyed.wait_until(lambda: known("beta") > 16, "so is the other tenant's")

    beta = {"Authorization": f"Bearer {TENANT_KEYS['beta']}"}
    cleared = httpx.post(f"{keyed.url}/api/v1/kv/clear", json={"tiers": ["cpu"]}, headers=beta, timeout=patience(60))
    assert cleared.status_code == 200, cleared.text
    keyed.wait_until(lambda: known("beta") == 0, "a tenant clears its own")
    assert known("alpha") > 16, "and nothing else"
    assert get(keyed, TENANT_KEYS["beta"], "/api/v1/kv/stats").json()["tenant"] == "beta"
    assert get(keyed, TENANT_KEYS["beta"], "/metrics").status_code == 403, "all tenants' figures are an operator's"


def test_no_secret_that_a_server_was_started_with_can_be_read_anywhere(keyed: RunningServer) -> None:
    keys = (*TENANT_KEYS.values(), FOREIGN_KEY, OPERATOR_KEY, METRICS_KEY)
    answers = [completion(keyed, key, [5, 6, 7] * 20) for key in keys]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 401]
    answers += [get(keyed, METRICS_KEY, "/metrics"), get(keyed, OPERATOR_KEY, "/metrics")]
    paths = ("/health", "/api/v1/settings", "/api/v1/kv/stats", "/api/v1/requests", "/openapi.json")
    answers += [get(keyed, OPERATOR_KEY, path) for path in paths]
    assert {answer.status_code for answer in answers[5:]} == {200}
    key = TENANT_KEYS["alpha"]
    with httpx.Client(base_url=keyed.url, headers={"Authorization": f"Bearer {key}"}, timeout=patience(60)) as client:
        mistakes = [
            httpx.get(f"{keyed.url}/v1/models", headers={"Authorization": key}, timeout=patience(60)),
            httpx.get(f"{keyed.url}/v1/models", params={"api_key": key}, timeout=patience(60)),
            client.get("/metrics"),
            client.post("/v1/completions", content=b"{"),
            client.post("/v1/completions", json={"model": "demo", "prompt": "Hi", "max_tokens": 1, "api_key": key}),
            client.post("/v1/chat/completions", json={"model": "demo", "messages": "Hi"}),
            client.post("/v1/chat/completions", content=b" " * 11_000_000),
        ]
        client.get(f"/v1/models/{key}")  # the client is told of its own word, and the log is not
        client.post("/v1/completions", json={"model": key, "prompt": "Hi", "cache_salt": key})
    assert [answer.status_code for answer in mistakes if answer.status_code >= 500] == []
    secrets = (*keys, COLLECTORS_PASSWORD, HUB_TOKEN, SERVER_SECRET)
    said = [answer.text for answer in (*answers, *mistakes)]
    assert [text for text in said for secret in secrets if secret in text] == []
    assert exposing(keyed, *secrets) == []


def get(server: RunningServer, key: str, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=patience(60))


def test_answers_that_are_handed_over_are_the_undisturbed_ones(keyed: RunningServer) -> None:
    server = keyed
    server.wait_until(lambda: both(server), "each replica has a role")
    assert len(server.processes(ENGINE)) == 2, "each replica's engine has a process"
    undisturbed = seen(ask_all(server, "whole", **{"X-CrossKV-Replica": "0"}))
    assert all(len(tokens) > 10 for _, tokens, *_ in undisturbed)
    handed_over = server.metric("crosskv_handovers_total", outcome="done")
    assert handed_over == 0, "a pinned request stays where it is"

    before = roles(server)
    (prefill, decode) = (next(rank for rank, has in before.items() if has == role) for role in ("prefill", "decode"))
    answers = ask_all(server, "handed over")
    assert seen(answers) == undisturbed
    assert {one.replica for one in answers} == {prefill}, "who computed the prompt"
    assert server.metric("crosskv_handovers_total", outcome="done") == len(asked())
    assert server.metric("crosskv_segments_loaded_total", replica=decode) >= len(asked()), "KV went with them"
    assert server.metric("crosskv_segments_loaded_total", replica=prefill) == 0
    server.wait_until_idle()

    with ThreadPoolExecutor(1) as pool:
        computed = server.metric("vllm:prompt_tokens_total")
        struck = pool.submit(ask_all, server, "struck")
        server.wait_until(lambda: server.metric("vllm:prompt_tokens_total") > computed, "they run")
        server.processes("ray::ServeReplica:crosskv:Replica")[0].send_signal(signal.SIGKILL)
        assert seen(struck.result()) == undisturbed
    assert seen(ask_all(server, "one role is empty")) == undisturbed
    server.wait_until(lambda: server.health()["status"] == "ok" and both(server), "the role is filled again", 90)
    assert seen(ask_all(server, "replaced")) == undisturbed
    server.wait_until(lambda: len(server.processes(ENGINE)) == 2, "no engine outlives its replica", 30.0)
