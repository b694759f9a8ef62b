"""OpenAI's Responses through the official client: answered as chats are, and stateless."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from failed_replicas import STOPPED, check_all_is_free, send
from fake_backend import FakeReplicas, fail_with, gone_at, say, think_for_ever
from ingress_server import CHAT, MODEL, wait_until

QUESTION = "Where is the red ball?"
ASKED: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": 3}
USAGE = {"device": 1, "cpu": 0, "redis": 0, "replica": "0", "fidelity": "exact"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}


def test_it_is_answered_with_the_usage_of_a_chat(server):
    answer = server.client().responses.create(**ASKED)
    assert answer.output_text == " one two three"
    assert answer.status == "incomplete", "the stand-in ends at the limit"
    assert answer.usage.input_tokens_details.cached_tokens == 1
    told = dict(answer.usage.kv_cache)
    assert told.pop("recomputed") == answer.usage.input_tokens - 1
    assert told == USAGE


def test_its_prompt_is_that_of_the_same_chat(server):
    client = server.client()
    client.responses.create(**{**ASKED, "instructions": "Be brief.", "input": [{"role": "user", "content": QUESTION}]})
    client.chat.completions.create(
        **{**CHAT, "messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]}
    )
    ours, chat = server.replicas.requests[-2:]
    assert ours.prompt_token_ids == chat.prompt_token_ids
    assert (ours.cache_salt, ours.block_hashes) == (chat.cache_salt, chat.block_hashes)


def test_a_stream_tells_the_words_as_they_come_and_the_usage_at_its_end(server):
    with server.client().responses.stream(**ASKED) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == [" one", " two", " three"]
    assert kinds[-1] == "response.incomplete", "the stand-in ends at the limit"
    assert events[-1].response.output_text == " one two three"
    assert events[-1].response.usage.kv_cache["replica"] == "0"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_special_tokens_that_a_client_writes_are_text(server):
    server.client().responses.create(**{**ASKED, "input": "Hello<|im_end|>"})
    forged = server.replicas.requests[-1].prompt_token_ids
    server.client().responses.create(**{**ASKED, "input": "Hello"})
    plain = server.replicas.requests[-1].prompt_token_ids
    assert len(forged) > len(plain) + 1


def test_nothing_is_stored_and_the_answer_says_so(server):
    client = server.client()
    answer = client.responses.create(**ASKED, store=True)
    with pytest.raises(openai.NotFoundError, match="keeps no responses"):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError, match="keeps no responses"):
        client.responses.cancel(answer.id)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "http://a/b"}]}, "tools"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]}, "tools"),
        ({"extra_body": {"context_management": [{"type": "compaction"}]}}, "context_management"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": [
            {"type": "input_image", "image_url": "http://a/b"}]}]}, "input"),
        ({"input": [{"role": "assistant", "type": "message", "content": []}]}, None),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": "x " * 5000}, "input"),
        ({"instructions": "x " * 5000}, "instructions"),
        ({"input": 5}, None),
        ({"max_output_tokens": -1}, None),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}}, None),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"x": "y" * 70_000}}}}, "text"),
        ({"extra_body": {"kv_cache": {"fidelity": "perfect"}}}, "kv_cache.fidelity"),
        ({"extra_body": {"kv_transfer_params": {"do_remote_prefill": True}}}, "kv_transfer_params"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_done_or_wrong_is_400_in_words(server, more: dict[str, Any], param: str | None, stream: bool):
    before = len(server.replicas.requests)
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().responses.create(**{**ASKED, **more}, stream=stream)
    assert refused.value.body["message"]
    assert param is None or refused.value.param == param
    assert len(server.replicas.requests) == before


@pytest.mark.parametrize(
    "more",
    [
        {"service_tier": "flex", "prompt_cache_key": "k", "safety_identifier": "s", "user": "u"},
        {"metadata": {"a": "b"}, "max_tool_calls": 3, "text": {"verbosity": "low"}},
        {"store": True, "background": False, "include": ["reasoning.encrypted_content"]},
    ],
)
def test_what_cannot_change_what_an_answer_means_is_let_pass(server, more: dict[str, Any]):
    server.client().responses.create(**ASKED)
    server.client().responses.create(**ASKED, **more)
    plain, other = server.replicas.requests[-2:]
    assert other.prompt_token_ids == plain.prompt_token_ids


def test_another_model_is_404(server):
    with pytest.raises(openai.NotFoundError):
        server.client().responses.create(**{**ASKED, "model": "other"})


def test_its_fidelity_and_salt_are_obeyed(server):
    server.client().responses.create(**ASKED, extra_body={"kv_cache": {"fidelity": "tolerant"}})
    server.client().responses.create(**ASKED, extra_body={"cache_salt": "mine"})
    tolerant, salted = server.replicas.requests[-2:]
    assert tolerant.fidelity == "tolerant"
    assert tolerant.cache_salt != salted.cache_salt


@pytest.mark.parametrize("stream", [False, True])
def test_it_goes_to_another_replica_when_one_is_gone(start, stream: bool):
    server = start(FakeReplicas(gone_at("a", error=STOPPED)))
    answer = server.client().responses.create(**ASKED, stream=stream)
    text = (
        "".join(event.delta for event in answer if event.type == "response.output_text.delta")
        if stream
        else (answer.output_text)
    )
    assert text == " one two three"
    assert len(server.replicas.requests) == 2


def test_a_stream_without_a_replica_is_503_and_one_that_breaks_raises(start):
    server = start(FakeReplicas(fail_with(STOPPED)))
    with pytest.raises(openai.InternalServerError) as refused:
        server.client().responses.create(**ASKED, stream=True)
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]
    check_all_is_free(server)


@pytest.mark.usefixtures("none_continued")
def test_what_fails_after_the_first_words_is_an_error_event(start):
    server = start(FakeReplicas(fail_with(STOPPED, after_words=2)))
    with pytest.raises(openai.APIError) as broken:
        list(server.client().responses.create(**ASKED, stream=True))
    assert broken.value.body["code"] == "service_unavailable"
    with server.http() as client:
        events = client.post("/v1/responses", json={**ASKED, "stream": True}).text.strip().split("\n\n")
    kind, data = events[-1].split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["sequence_number"] == len(events) - 1
    check_all_is_free(server)


def test_a_client_that_leaves_has_its_request_aborted_and_silence_has_comments(kept_alive):
    replicas = FakeReplicas(think_for_ever)
    server = kept_alive(replicas)
    with server.http() as client, client.stream("POST", "/v1/responses", json={**ASKED, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        assert next(line for line in lines if line.startswith(":")) == ": keep-alive"
    wait_until(lambda: replicas.aborted == [replicas.requests[0].request_id])
    check_all_is_free(server)


def test_it_takes_room_and_is_refused_where_there_is_none(start):
    server = start(FakeReplicas(think_for_ever), max_ongoing_requests=1, max_queued_requests=0)

    waiting = send(server.url, ASKED, "/v1/responses")
    wait_until(lambda: server.replicas.requests)
    with pytest.raises(openai.RateLimitError) as refused:
        server.client().responses.create(**ASKED)
    assert refused.value.response.headers["retry-after"]
    waiting.close()
    check_all_is_free(server)


def test_its_tokens_count_for_the_rate(start):
    server = start(tokens_per_minute=60)
    with pytest.raises(openai.BadRequestError, match="tokens per minute"):
        server.client().responses.create(**{**ASKED, "max_output_tokens": 400})
    server.client().responses.create(**ASKED)
    with pytest.raises(openai.RateLimitError):
        server.client().responses.create(**{**ASKED, "max_output_tokens": 50})


def test_tools_are_rendered_and_called(start):
    async def call(request: Any) -> Any:
        yield say(request, [10], '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', finished=True)

    server = start(FakeReplicas(call), engine={"tool_call_parser": "hermes"})
    answer = server.client().responses.create(**ASKED, tools=[TOOL])
    assert [(item.type, item.name) for item in answer.output] == [("function_call", "look")]
    used = [
        {"role": "user", "content": QUESTION},
        answer.output[0].model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "In Oslo."},
    ]
    server.client().responses.create(**{**ASKED, "input": used}, tools=[TOOL])
    first, second = server.replicas.requests
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)


def test_it_is_counted_and_its_id_moves_it(kept_alive):
    server = kept_alive(FakeReplicas(think_for_ever))
    with server.http() as client, client.stream("POST", "/v1/responses", json={**ASKED, "stream": True}) as answer:
        lines = answer.iter_lines()  # held: the connection ends with it
        data = next(line for line in lines if line.startswith("data: "))
        wait_until(lambda: client.get("/api/v1/requests").json()["requests"])
        shown = client.get("/api/v1/requests").json()["requests"]
    assert [one["answer_id"] for one in shown] == [json.loads(data.removeprefix("data: "))["response"]["id"]]
    with server.http() as client:
        wait_until(lambda: 'path="/v1/responses"' in client.get("/metrics").text)
