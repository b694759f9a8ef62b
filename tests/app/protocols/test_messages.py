"""Anthropic's Messages through the official client: answered as chats are, with errors as that client expects them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from failed_replicas import STOPPED, check_all_is_free, leave, send
from fake_backend import FakeReplicas, fail_with, gone_at, say, think_for_ever
from ingress_server import CHAT, MODEL, wait_until

QUESTION = "Where is the red ball?"
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3}
PATH = "/v1/messages"
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b"}}


def claude(server: Any, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0, **options})


def streamed(server: Any, **more: Any) -> str:
    with claude(server).messages.stream(**{**ASKED, **more}) as stream:
        return "".join(stream.text_stream)


def test_it_is_answered_with_the_usage_of_a_chat(server):
    answer = claude(server).messages.create(**ASKED)
    assert [block.text for block in answer.content] == [" one two three"]
    assert answer.stop_reason == "max_tokens"
    told = dict(answer.usage.kv_cache)
    assert answer.usage.cache_read_input_tokens == told["device"] == 1
    assert answer.usage.input_tokens == told["recomputed"]
    assert (told["replica"], told["fidelity"]) == ("0", "exact")


def test_a_stream_tells_the_words_as_they_come_and_the_usage_at_its_end(server):
    with claude(server).messages.stream(**ASKED) as stream:
        events = list(stream)
    assert [event.text for event in events if event.type == "text"] == [" one", " two", " three"]
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert delta.usage.kv_cache["replica"] == "0"
    assert delta.usage.cache_read_input_tokens == 1
    assert events[-1].type == "message_stop"


def test_its_prompt_is_that_of_the_same_chat(server):
    claude(server).messages.create(**ASKED, system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    server.client().chat.completions.create(**{**CHAT, "messages": [system, *CHAT["messages"]]})
    ours, chat = server.replicas.requests[-2:]
    assert ours.prompt_token_ids == chat.prompt_token_ids
    assert (ours.cache_salt, ours.block_hashes) == (chat.cache_salt, chat.block_hashes)


def test_tokens_are_counted_as_they_are_asked(server):
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = claude(server).messages.count_tokens(**asked)
    claude(server).messages.create(**ASKED)
    assert counted.input_tokens == len(server.replicas.requests[-1].prompt_token_ids)


def test_its_fidelity_and_salt_are_obeyed(server):
    claude(server).messages.create(**ASKED, extra_body={"kv_cache": {"fidelity": "tolerant"}})
    claude(server).messages.create(**ASKED, extra_body={"cache_salt": "mine"})
    tolerant, salted = server.replicas.requests[-2:]
    assert tolerant.fidelity == "tolerant"
    assert tolerant.cache_salt != salted.cache_salt


@pytest.mark.parametrize(
    "more",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}]},
        {"messages": [{"role": "user", "content": "x " * 5000}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"system": [IMAGE]},
        {"system": "x " * 5000},
        {"max_tokens": 0},
        {"extra_body": {"temperature": -1}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"tool_choice": {"type": "tool", "name": "nobody"}, "tools": [TOOL]},
        {"extra_body": {"kv_cache": {"fidelity": "perfect"}}},
        {"extra_body": {"kv_transfer_params": {"do_remote_prefill": True}}},
        {"extra_body": {"messages": "hello"}},
        {"extra_body": {"mcp_servers": [{"type": "url", "url": "http://a/b", "name": "a"}]}},
        {"extra_body": {"container": "container_1"}},
        {"extra_body": {"container": {"skills": [{"skill_id": "pptx"}]}}},
        {"extra_body": {"output_format": {"type": "json_schema", "schema": {}}}},
        {"extra_body": {"inference_geo": "us"}},
        {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
        {"extra_body": {"context_management": {"edits": "all"}}},
        {"extra_body": {"context_management": "all"}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{**TOOL, "type": "bash_20250124"}]},
        {"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_400_in_anthropics_shape(server, more: dict[str, Any], stream: bool):
    before = len(server.replicas.requests)
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude(server).messages.create(**{**ASKED, **more}, stream=stream)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.body["error"]["message"]
    assert len(server.replicas.requests) == before


@pytest.mark.parametrize("name", ["mcp_servers", "container", "output_format", "context_management"])
def test_a_refusal_names_the_field_also_where_tokens_are_only_counted(server, name: str):
    said = {name: {"edits": [{"type": "compact_20260112"}]}}
    for path in (PATH, f"{PATH}/count_tokens"):
        with server.http() as client:
            answer = client.post(path, json={**ASKED, **said})
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert f"`{name}`" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"mcp_servers": [], "container": None, "context_management": None},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"inference_geo": "global", "service_tier": "auto", "speed": "standard"},
        {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_what_cannot_change_an_answer_is_let_pass(server, more: dict[str, Any]):
    claude(server).messages.create(**ASKED)
    claude(server).messages.create(**ASKED, extra_body=more)
    plain, other = server.replicas.requests[-2:]
    assert other.prompt_token_ids == plain.prompt_token_ids
    assert other.sampling_params.max_tokens == plain.sampling_params.max_tokens


def test_what_changes_sampling_reaches_the_engine(server):
    sampled = {"top_k": 7, "top_p": 0.5, "temperature": 0.25, "stop_sequences": ["x"]}
    claude(server).messages.create(**ASKED, extra_body=sampled)
    sampling = server.replicas.requests[-1].sampling_params
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.stop) == (7, 0.5, 0.25, ["x"])


RETURNED = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}, IMAGE]}


@pytest.mark.parametrize("content", [[IMAGE], [RETURNED], [{**RETURNED, "content": [RETURNED]}]])
def test_media_are_refused_before_they_are_looked_at_or_counted(server, content: list[Any]):
    with pytest.raises(anthropic.BadRequestError, match="text only: images"):
        claude(server).messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": content}])
    with pytest.raises(anthropic.BadRequestError, match="text only: images"):
        claude(server).messages.create(**{**ASKED, "messages": [{"role": "user", "content": content}]})


def test_parts_of_anthropic_in_a_chat_are_still_400(server):
    with server.http() as client:
        part = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}
        body = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 400
        body["messages"] = [{"role": "user", "content": [{"type": "tool_use", "image_url": {"url": "http://a/b"}}]}]
        assert client.post("/v1/chat/completions", json=body).status_code == 400


def test_the_header_of_other_clients_of_anthropic_holds_a_key_too(start):
    server = start(api_keys={"key-a": "alice"})
    with server.http(headers={"x-api-key": "key-a"}) as client:
        assert client.post(PATH, json=ASKED).status_code == 200
    with server.http(headers={"x-api-key": "key-b"}) as client:
        assert client.post(PATH, json=ASKED).status_code == 401


@pytest.mark.parametrize("name", ["api_key", "auth_token"])
def test_keys_are_those_of_tenants_and_a_wrong_one_is_401_in_anthropics_shape(start, name: str):
    server = start(api_keys={"key-a": "alice", "key-b": "bob"})
    for key in ("key-a", "key-b"):
        client = anthropic.Anthropic(base_url=server.url, max_retries=0, **{name: key})
        client.messages.create(**ASKED)
    alices, bobs = server.replicas.requests
    assert alices.cache_salt != bobs.cache_salt
    assert not {*alices.block_hashes} & {*bobs.block_hashes}
    with pytest.raises(anthropic.AuthenticationError) as refused:
        anthropic.Anthropic(base_url=server.url, max_retries=0, **{name: "key-c"}).messages.create(**ASKED)
    assert refused.value.body["error"]["type"] == "authentication_error"


def test_a_wrong_bearer_is_not_mended_by_another_key(start):
    server = start(api_keys={"key-a": "alice"})
    with server.http(headers={"authorization": "Bearer wrong", "x-api-key": "key-a"}) as client:
        assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_it_goes_to_another_replica_when_one_is_gone(start, stream: bool):
    server = start(FakeReplicas(gone_at("a", error=STOPPED)))
    text = streamed(server) if stream else claude(server).messages.create(**ASKED).content[0].text
    assert text == " one two three"
    assert len(server.replicas.requests) == 2


def test_a_stream_without_a_replica_is_503(start):
    server = start(FakeReplicas(fail_with(STOPPED)))
    with pytest.raises(anthropic.InternalServerError) as refused:
        claude(server).messages.create(**ASKED, stream=True)
    assert refused.value.status_code == 503
    assert refused.value.body["error"]["type"] == "overloaded_error"
    assert refused.value.response.headers["retry-after"]
    check_all_is_free(server)


@pytest.mark.usefixtures("none_continued")
def test_what_fails_after_the_first_words_is_an_error_event(start):
    server = start(FakeReplicas(fail_with(STOPPED, after_words=2)))
    with pytest.raises(anthropic.APIStatusError) as broken:
        streamed(server)
    assert broken.value.body["error"]["type"] == "overloaded_error"
    with server.http() as client:
        events = client.post(PATH, json={**ASKED, "stream": True}).text.strip().split("\n\n")
    assert [event.split("\n")[0] for event in events].count("event: error") == 1
    assert events[-1].startswith("event: error")
    check_all_is_free(server)


def test_silence_has_comments_and_a_client_that_leaves_has_its_request_aborted(kept_alive):
    replicas = FakeReplicas(think_for_ever)
    server = kept_alive(replicas)
    with server.http() as client, client.stream("POST", PATH, json={**ASKED, "stream": True}) as answer:
        assert next(answer.iter_lines()) == ": keep-alive"
    wait_until(lambda: replicas.aborted == [replicas.requests[0].request_id])
    check_all_is_free(server)


def test_a_client_that_leaves_before_the_headers_has_its_request_aborted(start):
    replicas = FakeReplicas(think_for_ever)
    server = start(replicas)
    leave(server.url, ASKED, until=lambda: replicas.requests, path=PATH)
    wait_until(lambda: replicas.aborted == [replicas.requests[0].request_id])
    check_all_is_free(server)


def test_it_takes_room_and_is_refused_where_there_is_none(start):
    server = start(FakeReplicas(think_for_ever), max_ongoing_requests=1, max_queued_requests=0)
    waiting = send(server.url, ASKED, PATH)
    wait_until(lambda: server.replicas.requests)
    with pytest.raises(anthropic.RateLimitError) as refused:
        claude(server).messages.create(**ASKED)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    assert refused.value.response.headers["retry-after"]
    waiting.close()
    check_all_is_free(server)


def test_its_size_and_tokens_have_the_limits_of_chats(start):
    server = start(tokens_per_minute=60, max_body_bytes=4096)
    with pytest.raises(anthropic.RequestTooLargeError) as refused:
        claude(server).messages.create(**{**ASKED, "system": "x" * 5000})
    assert refused.value.body["error"]["type"] == "request_too_large"
    with pytest.raises(anthropic.BadRequestError, match="tokens per minute"):
        claude(server).messages.create(**{**ASKED, "max_tokens": 400})
    claude(server).messages.create(**ASKED)
    with pytest.raises(anthropic.RateLimitError):
        claude(server).messages.create(**{**ASKED, "max_tokens": 50})


def test_tools_are_rendered_and_called(start):
    async def call(request: Any) -> Any:
        yield say(request, [10], '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', finished=True)

    server = start(FakeReplicas(call), engine={"tool_call_parser": "hermes"})
    answer = claude(server).messages.create(**ASKED, tools=[TOOL])
    assert [(block.type, block.name) for block in answer.content] == [("tool_use", "look")]
    used = [
        *ASKED["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": [{"type": "text", "text": "Oslo"}]}
        ]},
    ]  # fmt: skip
    claude(server).messages.create(**{**ASKED, "messages": used}, tools=[TOOL])
    first, second = server.replicas.requests
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)


def test_another_model_and_what_is_not_served_are_404_in_anthropics_shape(server):
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude(server).messages.create(**{**ASKED, "model": "other"})
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="no batches"):
        claude(server).messages.batches.list()
    with server.http() as client:
        answer = client.get("/v1/files", headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, json.loads(answer.content)["type"]) == (404, "error")
