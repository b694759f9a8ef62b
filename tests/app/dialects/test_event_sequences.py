"""Recorded streams of the three APIs, held against the official clients' own types, event by event."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from types import SimpleNamespace
from typing import Any

import anthropic.types
import openai.types.chat
import pytest
from bodies import ASK, CHATS, COMPLETIONS, FUNCTION, MESSAGES, RESPONSES, chat, message, response
from fake_backend import FakeReplicas, fail_with, say
from ingress_server import MODEL, Server
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList

from app.gate.errors import UnavailableError
from app.protocols.models import show_models
from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "mill"}}\n</tool_call>'


@functools.cache
def reader(kind: Any) -> Any:
    """Return what checks an event of this kind. Made when first needed: that of OpenAI's events takes a second."""
    return TypeAdapter(kind).validate_python


async def speak(request: Any) -> Any:
    """As a replica does: the first output says where the KV came from, too."""
    first = say(request, [10], " one", finished=False)
    setattr(first, FIRST_USAGE, (say(request, [], "", finished=True).kv_transfer_params or {})[KV_CACHE_USAGE])
    yield first
    yield say(request, [11], " two", finished=True)


async def call(request: Any) -> Any:
    first = say(request, [10], CALL[:20], finished=False)
    first.num_cached_tokens = 1  # an engine that says no more
    yield first
    yield say(request, [10], CALL[20:], finished=True)


def events_of(server: Server, path: str, body: dict[str, Any]) -> tuple[Any, list[tuple[str, Any]]]:
    """The answer, and its events by name."""
    with server.http() as client:
        answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines and lines["data"] != "[DONE]":
            events.append((lines.get("event", ""), json.loads(lines["data"])))
    return answer, events


SCRIPTS = {"words": lambda: FakeReplicas(speak), "call": lambda: FakeReplicas(call)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_responses(start, script: str):
    server = start(SCRIPTS[script](), engine={"tool_call_parser": "hermes"})
    answer, events = events_of(server, RESPONSES, response(ASK, tools=[FUNCTION]))
    kinds = [reader(ResponseStreamEvent)(event).type for _, event in events]
    assert kinds == [name for name, _ in events]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    for event in (events[0][1], events[1][1], events[-1][1]):
        told = Response.model_validate(event["response"], strict=True)
        assert (event["response"]["store"], event["response"]["error"]) == (False, None)
        assert told.service_tier == "default"
    assert (kinds[-1] == "response.incomplete") == (events[-1][1]["response"]["status"] == "incomplete")
    check_headers(answer)


def test_a_whole_response_is_one_too(start):
    with start().http() as client:
        told = client.post(RESPONSES, json=response(ASK, service_tier="flex", store=True)).json()
    Response.model_validate(told, strict=True)
    assert (told["store"], told["error"], told["service_tier"], told["status"]) == (
        False,
        None,
        "default",
        "incomplete",
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_messages(start, script: str):
    server = start(SCRIPTS[script](), engine={"tool_call_parser": "hermes"})
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    answer, events = events_of(server, MESSAGES, message(ASK, tools=tools))
    kinds = [reader(anthropic.types.RawMessageStreamEvent)(event).type for _, event in events]
    assert kinds == [name for name, _ in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    start_of, end = events[0][1]["message"], events[-2][1]
    anthropic.types.Message.model_validate(start_of)
    assert start_of["id"].startswith("msg_")
    assert start_of["stop_sequence"] is None
    assert end["delta"]["stop_sequence"] is None
    for name in ("input_tokens", "cache_read_input_tokens"):
        assert start_of["usage"][name] == end["usage"][name]
    assert start_of["usage"]["cache_read_input_tokens"] == 1
    assert answer.headers["request-id"]
    check_headers(answer)
    with server.http() as client:
        whole = client.post(MESSAGES, json=message(ASK, tools=tools))
    anthropic.types.Message.model_validate(whole.json())
    assert whole.json()["id"].startswith("msg_")
    assert whole.json()["stop_sequence"] is None
    assert whole.headers["request-id"]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_chunks(start, path: str, usage: bool):
    chunk: Any = openai.types.chat.ChatCompletionChunk if path == CHATS else openai.types.Completion
    asked = chat(ASK) if path == CHATS else {"model": MODEL, "max_tokens": 3, "prompt": 'A text, "usage": {'}
    body = {**asked, "stream_options": {"include_usage": usage}}
    answer, events = events_of(start(), path, body)
    chunks = [event for _, event in events]
    for one in chunks:
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in one["choices"]]
        chunk.model_validate({**one, "choices": choices})  # OpenAI's own chunks have null there, its types do not
    assert [one.get("usage", "none") for one in chunks[:-1]] == [None if usage else "none"] * (len(chunks) - 1)
    assert bool(chunks[-1].get("usage")) == usage
    check_headers(answer)


@pytest.mark.usefixtures("none_continued")
def test_an_error_within_a_stream_has_its_apis_shape(start):
    for path, body, read in (
        (CHATS, chat(ASK), lambda events: events[-1][1]["error"]),
        (RESPONSES, response(ASK), lambda events: reader(ResponseStreamEvent)(events[-1][1]).model_dump()),
    ):
        server = start(FakeReplicas(fail_with(UnavailableError(), after_words=2)))
        _, events = events_of(server, path, body)
        assert read(events)["code"] == "service_unavailable"
    server = start(FakeReplicas(fail_with(UnavailableError(), after_words=2)))
    _, events = events_of(server, MESSAGES, message(ASK))
    assert events[-1][1]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("more", "prompt_ends"),
    [({"role": "assistant", "content": "The ball is"}, True), ({"role": "assistant", "content": ""}, False)],
)
def test_an_assistants_message_at_the_end_is_continued(server, more: dict[str, Any], prompt_ends: bool):
    with server.http() as client:
        assert client.post(MESSAGES, json=message(ASK, more)).status_code == 200
        ours = server.replicas.requests[-1].prompt_token_ids
        how = {"add_generation_prompt": not prompt_ends, "continue_final_message": prompt_ends}
        counted = client.post("/tokenize", json={"model": MODEL, "messages": [ASK, more], **how}).json()
        assert ours == counted["tokens"]
        count = client.post(f"{MESSAGES}/count_tokens", json=message(ASK, more)).json()
        assert count["input_tokens"] == len(ours)


def test_a_call_at_the_end_wants_its_result(server):
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
    with server.http() as client:
        answer = client.post(MESSAGES, json=message(ASK, used))
    assert answer.status_code == 400
    assert "tool_result" in answer.json()["error"]["message"]


def test_a_model_is_as_old_as_its_server_whenever_it_is_listed():
    """vLLM says the time at which it was asked."""

    async def show_available_models() -> ModelList:
        return ModelList(data=[ModelCard(id="one", created=next(times))])

    times = itertools.count(100)
    models = SimpleNamespace(show_available_models=show_available_models, model_config=SimpleNamespace(max_model_len=9))
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(openai_serving_models=models)), headers={})
    first, second = (json.loads(asyncio.run(show_models(request)).body)["data"][0]["created"] for _ in range(2))
    assert first == second


def test_anthropics_clients_have_their_own_words(start):
    server = start()
    version = {"anthropic-version": "2023-06-01"}
    with server.http() as client:
        listed = client.get("/v1/models", headers=version).json()
        shown = client.get(f"/v1/models/{MODEL}", headers=version).json()
        assert client.post(MESSAGES, json=message(ASK, stop_sequences=list("ABCDE"))).status_code == 200
        assert server.replicas.requests[-1].sampling_params.stop == list("ABCDE")
        assert client.post(MESSAGES, json=message(ASK, temperature=2)).status_code == 400
        refused = client.post(MESSAGES, json=message(ASK, temperature=2), headers={"x-request-id": "abc"})
        openais = client.get("/v1/models").json()
    assert listed["data"] == [shown]
    assert (shown["type"], shown["id"], shown["display_name"]) == ("model", MODEL, MODEL)
    anthropic.types.ModelInfo.model_validate(shown)
    assert refused.json()["request_id"] == refused.headers["request-id"] == "abc"
    assert openais["object"] == "list"


def check_headers(answer: Any) -> None:
    assert "no-cache" in answer.headers["cache-control"]
    assert answer.headers["x-accel-buffering"] == "no"
