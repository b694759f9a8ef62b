"""What chats have, the other protocols have: sampled answers come back, chunks are found, everything is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fake_backend import FakeReplicas, say
from ingress_server import MODEL
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer

from configs.settings import load_settings

TOKENIZER: Any = get_tokenizer(load_settings({}).model_source)
SAID = " Anna lives in Oslo."
SAMPLED = [token for letter in SAID for token in TOKENIZER.encode(letter, add_special_tokens=False)]
"""One token for each letter: the tokenizer would cut the text into words."""
QUESTION, NEXT = {"role": "user", "content": "Who lives where?"}, {"role": "user", "content": "Where is the red ball?"}
ANSWER = {"role": "assistant", "content": SAID}
OUTPUT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID}]}
FACTS = " ".join(f"{name} lives in {city}." for name in ("Anna", "Ben") for city in ("Paris", "Oslo", "Lima") * 4)
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
Body = Callable[..., dict[str, Any]]


async def sample(request: Any) -> AsyncIterator[Any]:
    if request.sampling_params.output_kind != RequestOutputKind.DELTA:
        yield say(request, SAMPLED, SAID, finished=True)
        return
    yield say(request, SAMPLED[:3], SAID[:3], finished=False)
    yield say(request, SAMPLED[3:], SAID[3:], finished=True)


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "max_tokens": 40, **more}


def response(*messages: Any, **more: Any) -> dict[str, Any]:
    items = [OUTPUT if message is ANSWER else message for message in messages]
    return {"model": MODEL, "input": items, "max_output_tokens": 40, **more}


BODIES: dict[str, Body] = {CHATS: chat, RESPONSES: response, MESSAGES: chat}


def holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens)))


@pytest.mark.parametrize(
    ("first", "second", "stream"),
    [
        (CHATS, RESPONSES, False),
        (RESPONSES, RESPONSES, True),
        (RESPONSES, MESSAGES, False),
        (MESSAGES, MESSAGES, True),
        (MESSAGES, CHATS, False),
    ],
)
def test_the_next_turn_has_the_tokens_that_were_sampled(fresh, first: str, second: str, stream: bool):
    server = fresh(FakeReplicas(sample))
    with server.http() as client:
        assert client.post(first, json=BODIES[first](QUESTION, stream=stream)).is_success
        assert client.post(second, json=BODIES[second](QUESTION, ANSWER, NEXT)).is_success
        counted = client.get("/metrics").text
    assert holds(server.replicas.requests[-1].prompt_token_ids, SAMPLED)
    assert 'crosskv_answers_returned_total{outcome="spliced"} 1.0' in counted


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_passes_to_no_other_tenant(fresh, path: str):
    server = fresh(FakeReplicas(sample), api_keys={"key-a": "alice", "key-b": "bob"})
    for key, messages in (("key-a", [QUESTION]), ("key-b", [QUESTION, ANSWER, NEXT])):
        with server.http(headers={"x-api-key": key}) as client:
            assert client.post(path, json=BODIES[path](*messages)).is_success
    assert not holds(server.replicas.requests[-1].prompt_token_ids, SAMPLED)


def test_tokens_are_counted_with_the_answer_as_it_was_sampled(fresh):
    server = fresh(FakeReplicas(sample))
    with server.http() as client:
        client.post(MESSAGES, json=chat(QUESTION))
        body = {"model": MODEL, "messages": [QUESTION, ANSWER, NEXT]}
        counted = client.post(f"{MESSAGES}/count_tokens", json=body).json()["input_tokens"]
        client.post(MESSAGES, json=chat(QUESTION, ANSWER, NEXT))
    assert counted == len(server.replicas.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("path", BODIES)
def test_the_chunks_of_a_blended_prompt_are_found(server, path: str):
    named = {"fidelity": "blended", "chunks": [FACTS]}
    content = {"role": "user", "content": f"Read this. {FACTS} Where does Anna live?"}
    with server.http() as client:
        assert client.post(path, json=BODIES[path](content, kv_cache=named)).is_success
    request = server.replicas.requests[-1]
    assert request.fidelity == "blended"
    assert "blend" in request.extras
    assert len(request.extras["blend"].chunks) == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_pinned_replica_is_heeded_and_stages_are_told(start, path: str):
    server = start(FakeReplicas(known_ranks={0, 1}))
    with server.http(headers={"X-CrossKV-Replica": "1", "X-CrossKV-Stages": "1"}) as client:
        told = client.post(path, json=BODIES[path](QUESTION)).json()["usage"]["kv_cache"]
    assert server.replicas.requests[-1].replica_pin == 1
    assert told["stages_ms"]


@pytest.mark.parametrize("path", BODIES)
def test_streams_are_counted_to_their_first_token(start, path: str):
    server = start()
    with server.http() as client:
        client.post(path, json=BODIES[path](QUESTION, stream=True))
        counted = client.get("/metrics").text
    assert "crosskv_time_to_first_token_seconds_count 1.0" in counted
    assert f'crosskv_requests_total{{path="{path}",status="200"}} 1.0' in counted
    assert 'crosskv_stage_seconds_count{stage="answer"} 1.0' in counted


@pytest.mark.parametrize("path", BODIES)
def test_a_constraint_that_cannot_be_compiled_is_400_before_anything_is_sent(server, path: str):
    wrong = {"type": "string", "pattern": "(("}
    constraint = {
        CHATS: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "a", "schema": wrong}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": wrong}}},
    }[path]
    before = len(server.replicas.requests)
    with server.http() as client:
        answer = client.post(path, json=BODIES[path](QUESTION, **constraint))
    assert answer.status_code == 400, answer.text
    assert len(server.replicas.requests) == before
