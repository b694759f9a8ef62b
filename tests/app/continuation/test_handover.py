"""Replicas with roles: a stream is prefilled at one, goes on at another, and reads as if it had had one all along."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import ray.exceptions
from failed_replicas import STOPPED, check_all_is_free, through_ray
from fake_backend import FakeReplicas, Script, say, speak
from ingress_server import COMPLETION, Server
from prometheus_client.parser import text_string_to_metric_families
from vllm.outputs import RequestOutput

from deployments.engine.crash_report import EngineDiedError
from deployments.protocol.stage_stamps import STAGE_STAMPS, StageStamps, this_clock
from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE, GenerateRequest

ROLES = {"a": "prefill", "b": "decode", "c": "decode"}
ON = {"prefill": 1}
PROMPT = list(range(100, 200))
DIED = ray.exceptions.ActorDiedError()


def told(replica: str) -> dict[str, Any]:
    return {"device": 4, "cpu": 32, "redis": 0, "recomputed": len(PROMPT) - 36, "replica": replica, "reason": "loaded"}


def prefill_end(request: GenerateRequest, reason: str = "length") -> RequestOutput:
    """As a prefill replica ends: no token, all that is said of the prompt, and when it passed where."""
    request.progress.routed = time.monotonic()
    output = say(request, [], "", finished=True)
    output.outputs[0].finish_reason = reason
    now = request.progress.routed
    stamps = StageStamps(this_clock(), now, now, scheduled=now + 1.0, first_token=now + 1.5, yielded=now + 1.5)
    output.kv_transfer_params = {KV_CACHE_USAGE: told("0"), STAGE_STAMPS: stamps}
    return output


async def by_phase(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """A prefill replica says one word and ends; a decode replica says what is left."""
    if request.phase != "prefill":
        async for output in speak(request):
            yield output
        return
    first = say(request, [10], " one", finished=False)
    setattr(first, FIRST_USAGE, told("0"))
    yield first
    yield prefill_end(request)


def failing(phase: str, after: int, error: Exception) -> Script:
    """`by_phase`, but the first request of this phase ends in `error` after so many outputs."""
    failed: list[str] = []

    async def script(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        left = after if request.phase == phase and not failed else 99
        if left == 0:
            failed.append(request.request_id)
            raise error
        async for output in by_phase(request):
            yield output
            left -= 1
            if left == 0:
                failed.append(request.request_id)
                raise error

    return script


def replicas(script: Script = by_phase, **options: Any) -> FakeReplicas:
    return FakeReplicas(script, **{"lacking": 300, "roles": ROLES, **options})


def stream(server: Server, **more: Any) -> list[Any]:
    body = {**COMPLETION, "prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, **more}
    with server.http() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def text(events: list[Any]) -> str:
    assert not [event for event in events if "error" in event]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def outcomes(server: Server, name: str = "crosskv_handovers") -> dict[str, float]:
    with server.http() as client:
        families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    labelled = [sample for sample in families[name].samples if sample.value and sample.labels]
    return {next(iter(sample.labels.values())): sample.value for sample in labelled}


def test_a_long_prompt_is_prefilled_at_one_replica_and_goes_on_at_another(start, caplog):
    behind = replicas()
    server = start(behind, roles=ON)
    events = stream(server)
    assert text(events) == " one two three"
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
    first, second = behind.requests
    assert [(one.phase, one.progress.replica) for one in (first, second)] == [("prefill", "a"), ("decode", "b")]
    assert (first.sampling_params.max_tokens, second.sampling_params.max_tokens) == (1, 3)
    assert (first.store_within_s, second.store_within_s) == (0.5, 0.0)
    assert (first.resumed_tokens, second.resumed_tokens) == ([], [10])
    assert second.avoid == (), "nobody has failed"
    assert outcomes(server) == {"done": 1}
    with server.http() as client:
        assert "crosskv_handover_gap_seconds_count 1.0" in client.get("/metrics").text
    assert outcomes(server, "crosskv_resumed_prompts") == {}
    assert outcomes(server, "crosskv_retried_prompts") == {}
    check_all_is_free(server)


def test_usage_and_stages_are_those_of_the_replica_that_computed_the_prompt(start):
    server = start(replicas(), roles=ON)
    usage = stream(server)[-1]["usage"]
    assert usage["completion_tokens"] == 3
    cache = usage["kv_cache"]
    assert {name: cache[name] for name in ("device", "cpu", "redis", "recomputed")} == {
        "device": 4, "cpu": 32, "redis": 0, "recomputed": len(PROMPT) - 36,
    }  # fmt: skip
    assert (cache["replica"], cache["reason"]) == ("0", "loaded")
    with server.http() as client:
        families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    steps = {s.name: s.value for s in families["crosskv_stage_seconds"].samples if s.labels.get("stage") == "step"}
    assert (steps["crosskv_stage_seconds_count"], steps["crosskv_stage_seconds_sum"]) == (1, pytest.approx(0.5))


def test_a_first_token_that_ends_the_answer_is_all_of_it(start):
    async def stops(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        output = say(request, [10], " one", finished=True)
        output.outputs[0].finish_reason = "stop"
        yield output

    behind = replicas(stops)
    server = start(behind, roles=ON)
    events = stream(server)
    assert text(events) == " one"
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "stop"
    assert len(behind.requests) == 1
    assert outcomes(server) == {"ended": 1}


def test_a_token_that_comes_with_the_prefills_end_reaches_the_client_and_the_answer_goes_on(start):
    async def at_once(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        if request.phase == "prefill":
            yield say(request, [10], " one", finished=True)
        else:
            async for output in speak(request):
                yield output

    server = start(replicas(at_once), roles=ON)
    events = stream(server)
    assert text(events) == " one two three"
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]] == [None, None, "length"]


def test_what_would_not_pay_stays_whole_on_a_decode_replica(start):
    behind = replicas(lacking=1)
    server = start(behind, roles=ON)
    assert text(stream(server)) == " one two three"
    (only,) = behind.requests
    assert (only.phase, only.progress.replica, only.sampling_params.max_tokens) == ("decode", "b", 3)
    assert outcomes(server) == {"whole": 1}


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1},
        {"n": 2, "temperature": 1.0},
        {"echo": True, "logprobs": 1},
        {"stream": False, "stream_options": None},
    ],
    ids=["one token", "several answers", "prompt logprobs", "not streamed"],
)
def test_what_is_not_for_roles_goes_to_any_replica(start, more):
    behind = replicas(speak)
    server = start(behind, roles=ON)
    body = {**COMPLETION, "prompt": PROMPT, "stream": True, **more}
    with server.http() as client:
        assert client.post("/v1/completions", json=body).status_code == 200
    (only,) = behind.requests
    assert (only.phase, only.store_within_s) == ("", 0.0)
    assert only.sampling_params.max_tokens == more.get("max_tokens", 3)
    assert outcomes(server) == {}


@pytest.mark.parametrize(
    ("options", "more"),
    [({"lacking": None}, {}), ({}, {"roles": None})],
    ids=["a role is missing", "no roles are set"],
)
def test_without_the_means_for_it_all_is_as_without_roles(start, options, more):
    behind = replicas(**options)
    server = start(behind, **{"roles": ON, **more})
    assert text(stream(server)) == " one two three"
    assert [one.phase for one in behind.requests] == [""]


@pytest.mark.parametrize("error", [DIED, STOPPED, through_ray(EngineDiedError([]))], ids=["died", "stopped", "engine"])
def test_a_prefill_replica_that_is_gone_before_its_token_costs_an_attempt(fresh, error):
    behind = replicas(failing("prefill", 0, error))
    server = fresh(behind, roles=ON)
    assert text(stream(server)) == " one two three"
    second = behind.requests[1]
    assert (second.phase, second.resumed_tokens, second.avoid) == ("decode", [], ("a",))
    assert second.sampling_params.max_tokens == 3
    assert outcomes(server) == {"failed": 1}
    check_all_is_free(server)


def test_one_that_is_gone_behind_its_token_loses_only_its_kv(fresh):
    behind = replicas(failing("prefill", 1, DIED))
    server = fresh(behind, roles=ON)
    assert text(stream(server)) == " one two three"
    second = behind.requests[1]
    assert (second.phase, second.resumed_tokens) == ("decode", [10])
    assert outcomes(server) == {"failed": 1}
    assert outcomes(server, "crosskv_resumed_prompts") == {"process_gone": 1}


@pytest.mark.parametrize(("after", "outcome", "resumed"), [(0, "failed", [10]), (1, "done", [10, 11])])
def test_a_decode_replica_that_is_gone_is_followed_by_another(fresh, after, outcome, resumed):
    behind = replicas(failing("decode", after, DIED))
    server = fresh(behind, roles=ON)
    assert text(stream(server)) == " one two three"
    assert [one.progress.replica for one in behind.requests] == ["a", "b", "c"]
    assert behind.requests[2].resumed_tokens == resumed
    assert outcomes(server) == {outcome: 1}
    check_all_is_free(server)


def test_without_a_decode_replica_the_answer_goes_on_where_it_can(start):
    behind = replicas(names=("a",), lacking=300)
    server = start(behind, roles=ON)
    assert text(stream(server)) == " one two three"
    assert [(one.phase, one.progress.replica) for one in behind.requests] == [("prefill", "a"), ("decode", "a")]


def test_a_router_that_cannot_say_costs_no_request(start, caplog):
    def broken(request: GenerateRequest) -> int | None:
        raise RuntimeError("broken in this test")

    behind = replicas()
    behind.lacking_tokens = broken  # type: ignore[method-assign]
    server = start(behind, roles=ON)
    assert text(stream(server)) == " one two three"
    assert [one.phase for one in behind.requests] == [""]
    assert "is not known" in caplog.text


def test_min_tokens_says_the_same_of_the_first_token_only(start):
    behind = replicas()
    server = start(behind, roles=ON)
    stream(server, min_tokens=3)
    assert [one.sampling_params.min_tokens for one in behind.requests] == [1, 3]
