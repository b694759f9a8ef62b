"""`crosskv_stage_seconds` and `usage.kv_cache.stages_ms`: where the time to the first token went."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from fake_backend import FakeReplicas, say
from prometheus_client.parser import text_string_to_metric_families
from vllm.outputs import RequestOutput

from app.metrics.stages import STAGES, RequestStages
from deployments.protocol.stage_stamps import STAGE_STAMPS, StageStamps, this_clock
from deployments.protocol.wire import GenerateRequest

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 3}
STREAM = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
STEP_S = 0.25


async def stamped(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """Two outputs, with the stamps of a replica whose engine has computed for `STEP_S`."""
    now = time.monotonic()
    request.progress.routed = now
    yield say(request, [10], " one", finished=False)
    last = say(request, [11], " two", finished=True)
    stamps = StageStamps(this_clock(), now, now, scheduled=now - STEP_S, first_token=now, yielded=now)
    last.kv_transfer_params = {**(last.kv_transfer_params or {}), STAGE_STAMPS: stamps}
    yield last


def usage_of(response: httpx.Response) -> dict[str, object]:
    """Of a stream, or of an answer in one piece."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return dict(response.json()["usage"]["kv_cache"])
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return dict(json.loads(events[-1])["usage"]["kv_cache"])


def observed(http: httpx.Client) -> dict[str, tuple[float, float]]:
    """How often, and how many seconds in all, by stage."""
    found: dict[str, dict[str, float]] = {stage: {} for stage in STAGES}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        if family.name == "crosskv_stage_seconds":
            for sample in family.samples:
                found[sample.labels["stage"]][sample.name] = sample.value
    return {
        stage: (values["crosskv_stage_seconds_count"], values["crosskv_stage_seconds_sum"])
        for stage, values in found.items()
    }


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
def test_who_asks_is_told_where_the_time_went(start, body: dict[str, object]):
    server = start(FakeReplicas(script=stamped))
    with server.http() as http:
        told = usage_of(http.post("/v1/chat/completions", json=body, headers={"X-CrossKV-Stages": "1"}))
        silent = usage_of(http.post("/v1/chat/completions", json=body))
        off = usage_of(http.post("/v1/chat/completions", json=body, headers={"X-CrossKV-Stages": "0"}))
    stages = told["stages_ms"]
    assert isinstance(stages, dict)
    expected = set(STAGES) - (set() if body is STREAM else {"answer"})
    assert set(stages) == expected
    assert stages["step"] == pytest.approx(1e3 * STEP_S)
    assert min(stages.values()) >= 0
    assert "stages_ms" not in silent
    assert "stages_ms" not in off


def test_who_may_not_ask_is_refused_in_words(start):
    server = start(loopback=False)
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"X-CrossKV-Stages": "1"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-CrossKV-Stages"
    assert "administrators" in answer.json()["error"]["message"]


def test_every_stage_of_every_prompt_is_counted(start):
    server = start(FakeReplicas(script=stamped))
    with server.http() as http:
        for body in (STREAM, CHAT, {**STREAM, "stream_options": None}):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        counts = observed(http)
    assert {stage: count for stage, (count, _) in counts.items()} == {
        stage: 2.0 if stage == "answer" else 3.0 for stage in STAGES
    }
    assert counts["step"][1] == pytest.approx(3 * STEP_S)


def test_a_replica_without_stamps_costs_nobody_an_answer(start):
    server = start()
    with server.http() as http:
        told = usage_of(http.post("/v1/chat/completions", json=STREAM, headers={"X-CrossKV-Stages": "1"}))
        counts = observed(http)
    assert set(told["stages_ms"]) == {"parse", "render", "tokenize", "check", "turn", "hash", "answer"}  # type: ignore[call-overload]
    assert counts["hash"][0] == 1.0
    assert counts["step"][0] == 0.0


def test_prompts_of_one_request_have_stages_of_their_own():
    first = RequestStages(time.monotonic())
    first.lap("parse")
    second = first.copy()
    second.lap("check")
    assert set(first.seconds) == {"parse"}
    assert set(second.seconds) == {"parse", "check"}


def test_tokenizing_is_no_part_of_rendering():
    stages = RequestStages(time.monotonic() - 3.0)
    stages.inside_next("tokenize", 2.0)
    stages.lap("render")
    assert stages.seconds["tokenize"] == 2.0
    assert stages.seconds["render"] == pytest.approx(1.0, abs=0.5)
    stages.inside_next("tokenize", 10.0)  # several at once
    stages.lap("render")
    assert stages.seconds["render"] == 0.0
