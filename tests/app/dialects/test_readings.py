"""What agents send is read as what it says in plainer words: the same prompt, under the same names of KV."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bodies import (
    ASK,
    CHAT_TOOL,
    CHATS,
    COMPLETIONS,
    COUNTED,
    FUNCTION,
    INPUT_PICTURE,
    MESSAGES,
    ON,
    PICTURE,
    PICTURE_URL,
    RESPONSES,
    SAME,
    TAKEN,
    TOOL,
    USED,
    chat,
    message,
    response,
    returned,
    said,
    text,
)
from fake_backend import FakeReplicas
from ingress_server import CONTEXT, MODEL, Server
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.renderers.online_renderer import OnlineRenderer

from app.metrics.left_out import KINDS, LeftOut

PARSED = {"engine": {"tool_call_parser": "hermes"}}


@pytest.fixture
def parsing(start: Any) -> Server:
    """A server whose model calls tools."""
    return start(FakeReplicas(), **PARSED)


def post(server: Server, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    with server.http() as client:
        return client.post(path, json=body, headers=headers)


def sent(server: Server, path: str, body: dict[str, Any]) -> Any:
    """What reaches the replicas of a body."""
    before = len(server.replicas.requests)
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    assert len(server.replicas.requests) == before + 1
    return server.replicas.requests[-1]


@pytest.mark.parametrize(("path", "body", "plainly"), SAME, ids=lambda value: str(value)[-60:])
def test_it_is_read_as_in_plainer_words(parsing, path: str, body: dict[str, Any], plainly: dict[str, Any]):
    given, plain = sent(parsing, path, body), sent(parsing, path, plainly)
    assert given.prompt_token_ids == plain.prompt_token_ids
    assert (given.cache_salt, given.block_hashes) == (plain.cache_salt, plain.block_hashes)


@pytest.mark.parametrize(("path", "body"), TAKEN, ids=lambda value: str(value)[60:120])
def test_what_other_servers_tools_did_may_stand_in_a_history(server, path: str, body: dict[str, Any]):
    sent(server, path, body)


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        (RESPONSES, response(ASK, tools=[FUNCTION, {"type": "web_search"}, {"type": "x\r\ny: z"}]), "web_search (1)"),
        (MESSAGES, message(ASK, tools=[TOOL, {"type": "code_execution_20250825", "name": "a"}]), "code_execution (1)"),
        (CHATS, chat(ASK, tools=[CHAT_TOOL, {"type": "web_search"}]), "web_search (1)"),
    ],
)
def test_hosted_tools_beside_functions_are_left_out_and_the_answer_says_so(start, path: str, body: Any, kept: str):
    server = start(**PARSED)
    for stream in (False, True):
        answer = post(server, path, {**body, "stream": stream})
        assert answer.status_code == 200
        assert kept in answer.headers["warnings"]
        assert "y: z" not in answer.headers["warnings"]
    with server.http() as client:
        counted = client.get("/metrics").text
    left_out = 2 * sum(tool.get("type") not in (None, "function") for tool in body["tools"])
    assert f'crosskv_left_out_total{{kind="hosted_tool"}} {left_out}.0' in counted
    assert "warnings" not in post(server, path, {**body, "tools": body["tools"][:1]}).headers


def test_what_a_client_calls_a_tool_is_no_part_of_the_header():
    found = LeftOut()
    for name in ("web_search", "web_search_20250305", "evil\r\nset-cookie: a", "", None, 5, "a" * 10_000, "é"):
        for kind in KINDS:
            found.note(kind, name)
    assert found.header().isascii()
    assert found.header().isprintable()
    assert len(found.header()) < 500
    assert found.counts == dict.fromkeys(KINDS, 8)


@pytest.mark.parametrize(
    ("choice", "param"), [("required", "tool_choice"), ({"type": "custom", "name": "edit"}, "tool_choice")]
)
def test_a_grammar_is_told_to_the_model_and_a_call_of_it_is_not_forced(server, choice: Any, param: str):
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "keep" | "drop"'}
    edit = {"type": "custom", "name": "edit", "description": "Says what to do.", "format": lark}
    answer = post(server, RESPONSES, response(ASK, tools=[FUNCTION, edit]))
    assert answer.status_code == 200, answer.text
    assert "lark (1)" in answer.headers["warnings"]
    refused = post(server, RESPONSES, response(ASK, tools=[edit], tool_choice=choice))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert "grammar" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, chat(ASK, max_tokens=32_000)),
        (CHATS, chat(ASK, max_completion_tokens=32_000)),
        (COMPLETIONS, {"model": MODEL, "prompt": "The ball", "max_tokens": 10**9}),
        (RESPONSES, response(ASK, max_output_tokens=32_000)),
        (MESSAGES, message(ASK, max_tokens=32_000)),
        (MESSAGES, message(ASK, max_tokens=32_000, thinking={"type": "enabled", "budget_tokens": 31_999})),
    ],
)
def test_an_answers_limit_beyond_the_context_is_what_the_prompt_leaves(server, path: str, body: dict[str, Any]):
    request = sent(server, path, body)
    assert request.sampling_params.max_tokens == CONTEXT - len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, chat(ASK, tools=[{**CHAT_TOOL, "function": {"name": f"t{n}"}} for n in range(1024)])),
        (RESPONSES, response(ASK, tools=[{**FUNCTION, "name": f"t{n}"} for n in range(1024)])),
        (MESSAGES, message(ASK, tools=[{**TOOL, "name": f"t{n}"} for n in range(1024)])),
        (CHATS, chat(ASK, tools=[{**CHAT_TOOL, "function": {"name": "t", "description": "It does. " * 250}}] * 127)),
    ],
    ids=["chats", "responses", "messages", "large"],
)
def test_a_thousand_tools_are_served(parsing, path: str, body: dict[str, Any]):
    sent(parsing, path, body)


def test_more_tools_or_larger_ones_are_400_in_words(start):
    server = start(**PARSED)
    tool = {**CHAT_TOOL, "function": {"name": "t", "description": "x" * 2 * 1024**2}}
    large = post(server, CHATS, chat(ASK, tools=[tool]))
    assert large.status_code == 400
    assert "`tools` is larger than 2097152 bytes" in large.json()["error"]["message"]
    assert post(server, CHATS, chat(ASK, tools=[CHAT_TOOL] * 10)).status_code == 200
    assert "1024 entries" in post(server, CHATS, chat(ASK, tools=[CHAT_TOOL] * 1025)).json()["error"]["message"]


def test_a_model_has_the_names_that_the_settings_give_it_and_one_kv(start):
    server = start(model_aliases=["claude-haiku-*", "gpt-4o-mini"])
    plain = sent(server, CHATS, chat(ASK))
    for name in ("claude-haiku-4-5-20251001", "gpt-4o-mini"):
        named = sent(server, CHATS, {**chat(ASK), "model": name})
        assert (named.prompt_token_ids, named.block_hashes) == (plain.prompt_token_ids, plain.block_hashes)
        assert (named.cache_salt, named.fingerprint) == (plain.cache_salt, plain.fingerprint)
        for path, body in ((RESPONSES, response(ASK)), (MESSAGES, message(ASK)), (COUNTED, message(ASK))):
            assert post(server, path, {**body, "model": name}).status_code == 200
        with server.http() as client:
            assert client.get(f"/v1/models/{name}").json()["id"] == MODEL
    for name in ("claude-haiku", "xgpt-4o-mini", "GPT-4o-mini", "no-such-model", "*"):
        assert post(server, CHATS, {**chat(ASK), "model": name}).status_code == 404
    assert len(sent(server, CHATS, chat(ASK)).block_hashes) == len(plain.block_hashes)


MEDIA: list[tuple[str, dict[str, Any]]] = [
    (MESSAGES, message(said(PICTURE, text("?")), {"role": "assistant", "content": "Hm."}, ON)),
    (MESSAGES, message(ASK, USED, said(returned([text("a"), PICTURE])))),
    (CHATS, chat(said(PICTURE_URL, text("?")), {"role": "assistant", "content": "Hm."}, ON)),
    (RESPONSES, response(said(INPUT_PICTURE), {"role": "assistant", "content": "Hm."}, ON)),
    (
        RESPONSES,
        response(
            ASK,
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [INPUT_PICTURE]},
        ),
    ),
]


@pytest.mark.parametrize(("path", "body"), MEDIA)
def test_a_picture_earlier_in_a_history_becomes_a_sentence_where_the_settings_say_so(start, path: str, body: Any):
    kept = start()
    assert "text only" in post(kept, path, body).json()["error"]["message"]
    server = start(drop_media=True)
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    assert "image (1)" in answer.headers["warnings"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, message(ASK, said(PICTURE))),
        (CHATS, chat(ASK, said(PICTURE_URL))),
        (RESPONSES, response(ASK, said(INPUT_PICTURE))),
        (MESSAGES, message(ASK, said({"type": "document", "source": {"type": "url", "url": "http://127.0.0.1:9/x"}}))),
    ],
)
def test_what_the_last_message_shows_is_refused_all_the_same(start, path: str, body: Any):
    assert "text only" in post(start(drop_media=True), path, body).json()["error"]["message"]


ODD: list[Any] = [None, 5, "a", [], {}, [[]], [None], {"a": []}, [{"type": 5}], [{"type": "text"}], [{"role": 5}],
                  [{"role": "user", "content": 5}], [{"role": "assistant", "content": [5, None, {}]}],
                  [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "document"}]}]}],
                  [{"type": "function_call"}], [{"type": "reasoning", "content": 5, "summary": {}}],
                  [{"type": "_call", "call_id": []}], [{"type": "document", "source": {"type": "base64", "data": "!"}}],
                  [{"role": "assistant", "tool_calls": [None, {"function": 5}, {"function": {"arguments": [1]}}]}],
                  [{"type": "custom", "format": {"type": "grammar"}}],
                  [{"type": "mcp_call", "output": {"a": {}}}]]  # fmt: skip


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES, COUNTED, "/tokenize"])
def test_odd_shapes_are_answered_or_refused_and_never_a_defect(start, path: str, value: Any):
    server = start(drop_media=True)
    for field in ("messages", "input", "system", "tools", "tool_choice", "thinking", "model", "max_tokens", "n"):
        answer = post(server, path, {**chat(ASK), **response(ASK), field: value})
        assert answer.status_code in (200, 400, 404), (field, answer.text)


def test_a_model_without_a_chat_template_names_the_setting(start, monkeypatch: pytest.MonkeyPatch):
    async def render(*_: Any, **__: Any) -> Any:
        raise ChatTemplateResolutionError("there is none")

    server = start()
    for name in ("render_chat", "render_responses"):
        monkeypatch.setattr(OnlineRenderer, name, render)
    for path, body in (
        (CHATS, chat(ASK)),
        (RESPONSES, response(ASK)),
        (MESSAGES, message(ASK)),
        (COUNTED, message(ASK)),
    ):
        answer = post(server, path, body)
        assert answer.status_code == 400, answer.text
        assert "`chat_template`" in answer.json()["error"]["message"]


def test_blocks_within_blocks_do_not_grow(server):
    def nested(depth: int) -> Any:
        block: Any = {"query": '"\\'}
        for _ in range(depth):
            block = {"type": "server_tool_use", "name": "a", "input": block}
        return block

    counts = []
    for depth in (4, 8, 12):
        answer = post(server, COUNTED, message(said(nested(depth))))
        counts.append(len(answer.text) if answer.status_code != 200 else answer.json()["input_tokens"])
    assert counts[2] - counts[1] < 2 * (counts[1] - counts[0] + 10)


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_several_answers_at_temperature_zero_are_the_likeliest_each_time(start, path: str):
    server = start(FakeReplicas())
    body = {**chat(ASK), "prompt": "The ball", "n": 2, "temperature": 0}
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    sampling = server.replicas.requests[-1].sampling_params
    assert (sampling.n, sampling.top_k, sampling.temperature) == (2, 1, 1.0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, chat({"role": "narrator", "content": "Once."}), "messages.0.role"),
        (CHATS, {"messages": [ASK]}, "model"),
        (CHATS, {"model": "", "messages": [ASK]}, "model"),
        (COMPLETIONS, {"prompt": "a"}, "model"),
        (RESPONSES, {"input": "a"}, "model"),
        ("/detokenize", {"model": MODEL, "tokens": [99_999_999]}, "tokens"),
        (COMPLETIONS, {"model": MODEL, "prompt": "a", "suffix": "b"}, "suffix"),
        (RESPONSES, response(ASK, tools=[FUNCTION], tool_choice={"type": "web_search"}), "tool_choice"),
        (RESPONSES, response({"type": "item_reference", "id": "a"}), "input"),
        (RESPONSES, response({"type": "nonsense"}), "input"),
        (RESPONSES, response({"type": ["message"]}), "input"),
        (CHATS, chat(ASK, {"role": "assistant", "tool_calls": [{"id": 5}]}, ON), "messages"),
        (CHATS, chat(ASK, tools=[CHAT_TOOL]), "tool_choice"),
        (CHATS, chat(ASK, tools=[CHAT_TOOL], tool_choice="required"), "tool_choice"),
    ],
)
def test_what_cannot_be_meant_is_400_by_the_fields_name(server, path: str, body: Any, param: str):
    answer = post(server, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    message = answer.json()["error"]["message"]
    assert param.split(".")[0] in message or "engine.tool_call_parser" in message


def test_a_prompt_that_fills_the_context_is_told_so(server):
    for path, body in (
        (COMPLETIONS, {"model": MODEL, "prompt": [5] * CONTEXT}),
        (COMPLETIONS, {"model": MODEL, "prompt": [5] * CONTEXT, "max_tokens": 16}),
        (CHATS, filling_chat(server)),
        (CHATS, {**filling_chat(server), "max_tokens": 16}),
        (RESPONSES, {"model": MODEL, "input": filling_chat(server)["messages"]}),
    ):
        answer = post(server, path, body)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert "context" in error["message"]
        assert str(CONTEXT) in error["message"]
        assert "at least 1" not in error["message"]


def filling_chat(server: Server) -> dict[str, Any]:
    def length(words: int) -> int:
        counted = post(server, "/tokenize", {"messages": [{"role": "user", "content": "b" + " a" * words}]})
        return json.loads(counted.text)["count"]

    words = 100 + CONTEXT - length(100)
    assert length(words) == CONTEXT
    return {"model": MODEL, "messages": [{"role": "user", "content": "b" + " a" * words}]}


def test_tokens_of_a_response_are_counted_as_they_are_asked(server):
    body = response(ASK, instructions="Be brief.", tools=[FUNCTION, {"type": "web_search"}])
    request = sent(server, RESPONSES, body)
    del body["max_output_tokens"]
    before = len(server.replicas.requests)
    counted = post(server, "/v1/responses/input_tokens", body)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": len(request.prompt_token_ids)}
    assert len(server.replicas.requests) == before
