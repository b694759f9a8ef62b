"""A stream whose replica is gone after its first output goes on at another one; what cannot ends as it always did."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import ray.exceptions
from failed_replicas import STOPPED, check_all_is_free, through_ray
from fake_backend import FakeReplicas, gone_at, say, speak
from ingress_server import CHAT, COMPLETION, Server
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.engine.exceptions import EngineDeadError

from app.continuation import generated_tokens
from app.openai.retries import PASSED_TOKENS
from deployments.engine.crash_report import EngineDiedError
from deployments.protocol.wire import FIRST_USAGE, GenerateRequest
from kvmanager.segments import keys

DIED = ray.exceptions.ActorDiedError()
UNREACHABLE = ray.exceptions.ActorUnavailableError("gone", b"x" * 16)
GONE = [
    (DIED, "process_gone"),
    (through_ray(EngineDeadError()), "engine_dead"),
    (STOPPED, "stopped"),
    (UNREACHABLE, "unreachable"),
]
WORDS = [" one", " two", " three"]


def stream_of(
    server: Server, path: str = "/v1/completions", headers: dict[str, str] | None = None, **more: Any
) -> list[Any]:
    """The events, parsed; the last one is "[DONE]"."""
    body = {
        **(CHAT if "chat" in path else COMPLETION),
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    with server.http() as client:
        answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def text_of(events: list[Any]) -> str:
    """What the client reads."""
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def error_of(events: list[Any]) -> dict[str, Any] | None:
    """The error event before the end, if there is one."""
    assert events[-1] == "[DONE]"
    return events[-2].get("error") if isinstance(events[-2], dict) else None


def counted(server: Server, name: str) -> dict[str, float]:
    with server.http() as client:
        families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    return {s.labels.get("reason", s.name.rpartition("_")[2]): s.value for s in families[name].samples if s.value}


def dies_at(*names: str, error: Exception, after: int = 1) -> Any:
    """At these replicas so many words of what is left, then `error`; elsewhere all that is left."""

    async def script(request: GenerateRequest) -> AsyncIterator[Any]:
        left = after
        async for output in speak(request):
            if request.progress.replica in names and not left:
                raise error
            left -= 1
            yield output

    return script


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("error", "reason"), GONE, ids=[reason for _, reason in GONE])
def test_the_stream_goes_on_behind_what_it_has_said(fresh, caplog, path: str, error: Exception, reason: str):
    replicas = FakeReplicas(dies_at("a", error=error))
    server = fresh(replicas)
    events = stream_of(server, path)
    assert (text_of(events), error_of(events)) == (" one two three", None)
    first, second = replicas.requests
    assert (first.resumed_tokens, second.resumed_tokens) == ([], [10])
    assert (second.progress.replica, second.avoid) == ("b", ("a",))
    assert second.request_id == f"{first.request_id}-retry1"
    assert second.prompt_token_ids == first.prompt_token_ids
    assert counted(server, "crosskv_resumed_prompts") == {reason: 1}
    assert counted(server, "crosskv_retried_prompts") == {}
    assert counted(server, "crosskv_resume_gap_seconds")["count"] == 1
    (line,) = [record.message for record in caplog.records if "to go on behind them" in record.message]
    assert reason in line
    assert "after 1 tokens" in line
    check_all_is_free(server)


def test_its_blocks_are_those_of_the_prompt_and_the_answer(start):
    replicas = FakeReplicas(dies_at("a", error=STOPPED))
    server = start(replicas)
    stream_of(server, prompt=list(range(100, 163)))  # one token short of two blocks
    first, second = replicas.requests
    assert (len(first.block_hashes), len(second.block_hashes)) == (1, 2)
    assert second.block_hashes == list(keys.block_hashes([*range(100, 163), 10], 32, first.cache_salt))


def test_it_goes_on_a_second_time_and_the_usage_is_that_of_its_first_replica(start):
    async def script(request: GenerateRequest) -> AsyncIterator[Any]:
        first = True
        async for output in dies_at("a", "b", error=STOPPED)(request):
            if first and not request.resumed_tokens:
                told = {
                    "device": 1,
                    "cpu": 0,
                    "redis": 0,
                    "recomputed": len(request.prompt_token_ids) - 1,
                    "replica": "7",
                }
                setattr(output, FIRST_USAGE, {**told, "reason": "short"})
            first = False
            yield output

    replicas = FakeReplicas(script)
    server = start(replicas)
    events = stream_of(server)
    assert text_of(events) == " one two three"
    assert [request.resumed_tokens for request in replicas.requests] == [[], [10], [10, 11]]
    assert [request.avoid for request in replicas.requests] == [(), ("a",), ("a", "b")]
    usage = events[-2]["usage"]
    assert (usage["kv_cache"]["replica"], usage["kv_cache"]["device"], usage["kv_cache"]["reason"]) == ("7", 1, "short")
    assert usage["completion_tokens"] == 3
    assert counted(server, "crosskv_generated_tokens") == {"total": 3}
    assert counted(server, "crosskv_resumed_prompts") == {"stopped": 2}


def test_without_a_first_usage_the_counts_add_up_and_none_is_negative(start, caplog):
    replicas = FakeReplicas(dies_at("a", error=STOPPED))
    events = stream_of(start(replicas))
    cache, tokens = events[-2]["usage"].get("kv_cache"), events[-2]["usage"]["prompt_tokens"]
    if cache is not None:
        assert sum(cache[tier] for tier in ("device", "cpu", "redis", "recomputed")) == tokens
        assert min(cache[tier] for tier in ("device", "cpu", "redis", "recomputed")) >= 0
    assert [record.message for record in caplog.records if "add up" in record.message] == []


@pytest.mark.parametrize(
    ("more", "headers", "most_tokens"),
    [
        ({"n": 2, "temperature": 1}, {}, 100),
        ({"echo": True, "logprobs": 1}, {}, 100),
        ({}, {"X-CrossKV-Replica": "0"}, 100),
        ({}, {}, 1),
    ],
    ids=["several answers", "prompt logprobs", "pinned", "too long"],
)
def test_what_cannot_go_on_ends_in_an_error_event_as_before(fresh, monkeypatch, more, headers, most_tokens):
    monkeypatch.setattr(generated_tokens, "MOST_TOKENS", most_tokens)
    replicas = FakeReplicas(dies_at("a", error=DIED, after=2))
    server = fresh(replicas)
    error = error_of(stream_of(server, headers=headers, **more))
    assert error is not None
    assert error["code"] == "service_unavailable"
    assert len(replicas.requests) == 1
    assert counted(server, "crosskv_resumed_prompts") == {}
    check_all_is_free(server)


def test_what_is_not_streamed_begins_anew(fresh):
    replicas = FakeReplicas(gone_at("a", error=DIED))
    server = fresh(replicas)
    with server.http() as client:
        answer = client.post("/v1/completions", json=COMPLETION)
    assert answer.json()["choices"][0]["text"] == " one two three"
    assert [request.resumed_tokens for request in replicas.requests] == [[], []]
    assert counted(server, "crosskv_retried_prompts") == {"process_gone": 1}


def test_when_every_replica_dies_under_it_the_stream_ends_and_two_engines_at_most_are_lost(fresh):
    """Without a crash report: a process that was killed from outside, or that the prompt killed."""
    replicas = FakeReplicas(dies_at("a", "b", "c", error=DIED), names=("a", "b", "c"))
    server = fresh(replicas)
    error = error_of(stream_of(server))
    assert error is not None
    assert error["code"] == "internal_error"
    assert len(replicas.requests) == 2
    assert counted(server, "crosskv_poison_prompts") == {"total": 1}
    with server.http() as client:
        again = client.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert again.status_code == 503, "it is refused for a while"


def test_a_prompt_that_kills_engines_while_it_answers_ends_no_third_one(fresh):
    def script(request: GenerateRequest) -> AsyncIterator[Any]:
        return dies_at("a", "b", "c", error=through_ray(EngineDiedError((request.request_id,))))(request)

    replicas = FakeReplicas(script)
    server = fresh(replicas)
    error = error_of(stream_of(server))
    assert error is not None
    assert error["code"] == "internal_error"
    assert len(replicas.requests) == 2
    with server.http() as client:
        again = client.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert again.status_code == 503, "it is refused for a while"


def test_a_prompt_that_kills_engines_beside_others_late_in_its_answer_ends_no_third_one(fresh):
    async def script(request: GenerateRequest) -> AsyncIterator[Any]:
        for _ in range(PASSED_TOKENS + 1):
            yield say(request, [10], " word", finished=False)
        raise through_ray(EngineDiedError((request.request_id, "somebody else")))

    replicas = FakeReplicas(script, names=("a", "b", "c"))
    assert error_of(stream_of(fresh(replicas), max_tokens=60)) is not None
    assert len(replicas.requests) == 2


def test_an_innocent_stream_goes_on_however_often_others_kill_its_engine_up_to_the_number_of_replicas(fresh):
    error = through_ray(EngineDiedError(("somebody else",)))
    replicas = FakeReplicas(dies_at("a", "b", error=error))
    server = fresh(replicas)
    assert text_of(stream_of(server)) == " one two three"
    assert counted(server, "crosskv_resumed_prompts") == {"engine_dead": 2}
    assert counted(server, "crosskv_poison_prompts") == {"total": 0} or counted(server, "crosskv_poison_prompts") == {}


def test_a_stream_that_outlived_one_death_is_not_charged_with_it_later(fresh):
    replicas = FakeReplicas(dies_at("a", error=DIED))
    server = fresh(replicas)
    assert text_of(stream_of(server)) == " one two three"
    replicas.script = dies_at("a", "b", error=DIED, after=1)
    # A second time, the same prompt loses its replica: it is tried once more, for it was cleared when it ended.
    replicas.script = dies_at("a", error=DIED)
    assert text_of(stream_of(server)) == " one two three"
    assert counted(server, "crosskv_resumed_prompts") == {"process_gone": 2}


def test_logprobs_and_token_ids_come_once_each(start):
    replicas = FakeReplicas(dies_at("a", error=STOPPED))
    events = stream_of(start(replicas), logprobs=0, return_token_ids=True)
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == [10, 11, 12]
    assert [token for choice in choices for token in (choice.get("logprobs") or {}).get("tokens", ())] == [
        "<10>", "<11>", "<12>",
    ]  # fmt: skip


def test_a_replica_that_refuses_to_go_on_ends_the_stream(start):
    async def script(request: GenerateRequest) -> AsyncIterator[Any]:
        if request.resumed_tokens:
            output = say(request, [], "", finished=True)
            output.outputs[0].finish_reason = "error"
            yield output
            return
        async for output in dies_at("a", error=STOPPED)(request):
            yield output

    replicas = FakeReplicas(script)
    server = start(replicas)
    error = error_of(stream_of(server))
    assert error is not None
    assert error["code"] == "service_unavailable"
    check_all_is_free(server)
