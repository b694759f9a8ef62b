"""Other settings: no sharing, one replica, tenants, a Redis that cannot be used, replicas with roles."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import pytest
from first_minute import WithoutRedis

from load_tests.faults.redis_process import PASSWORD
from load_tests.harness.running_server import RunningServer

pytestmark = pytest.mark.server

PROMPT = "Anna lives in Oslo. " * 60
WITHOUT_SHARING = {
    "replicas": 1,
    "kv": {"enabled": False},
    "http": {"debug_headers": True, "api_keys": {"alpha-key": "alpha", "beta-key": "beta"}},
}


@pytest.mark.long(
    "tests/deployments/engine/test_supported_models.py::test_without_sharing_an_engine_recomputes_everything"
)
@pytest.mark.long("tests/deployments/replica/test_serve_options.py::test_both_deployments_have_them")
@pytest.mark.parametrize("private_server", [WITHOUT_SHARING], indirect=True)
def test_a_server_without_sharing_serves_and_recomputes_everything(private_server: RunningServer) -> None:
    def ask(key: str, **headers: str) -> httpx.Response:
        return httpx.post(
            f"{private_server.url}/v1/completions",
            json={"model": "demo", "prompt": PROMPT, "max_tokens": 4},
            headers={"Authorization": f"Bearer {key}", **headers},
            timeout=60,
        )

    answers = [ask("alpha-key"), ask("alpha-key", **{"X-CrossKV-Replica": "0"}), ask("beta-key")]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    usages: list[dict[str, Any]] = [answer.json()["usage"] for answer in answers]
    assert all(usage["kv_cache"]["recomputed"] == usage["prompt_tokens"] for usage in usages)
    assert ask("wrong-key").status_code == 401
    assert httpx.get(f"{private_server.url}/health").json()["status"] == "ok"


def test_a_server_whose_redis_cannot_be_used_says_so_and_serves_with_two_tiers(without_redis: WithoutRedis) -> None:
    assert "password" in without_redis.redis_state
    first, second = (answer["usage"]["kv_cache"] for answer in without_redis.answers)
    assert (first["device"], first["redis"]) == (0, 0)
    assert second["device"] > 0
    assert "redis:" in without_redis.log
    assert PASSWORD not in without_redis.log + without_redis.redis_state


WITH_ROLES = {
    "dtype": "float32",
    "replicas": 2,
    "roles": {"prefill": 1, "decode": 1, "split": "always", "least_tokens": 32, "handover_deadline_s": 5.0},
    "kv": {"redis_url": None},
    "http": {"debug_headers": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.8, "repetition_penalty": 1.1},
    "held back": {"stop": ["a stop string that never comes"]},
    "structured": {"structured_outputs": {"regex": "([a-z]{3} [0-9]{2};){6}"}, "ignore_eos": False},
    "least": {"min_tokens": 20, "ignore_eos": False},
}
ANSWER_TOKENS = 24


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
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=120) as response:
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


@pytest.mark.parametrize("private_server", [WITH_ROLES], indirect=True)
def test_answers_that_are_handed_over_are_the_undisturbed_ones(private_server: RunningServer) -> None:
    server = private_server
    server.wait_until(lambda: both(server), "each replica has a role")
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
