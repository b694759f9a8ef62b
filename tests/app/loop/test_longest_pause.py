"""Nothing that a client sends stops the loop, and with it all streams, for longer than a tenth of a second."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_backend import FakeReplicas, backend
from ingress_server import CHAT, COMPLETION, MODEL, running

from load_tests.harness.patience import slowness
from tests.app.loop.long_answers import speak_at_length
from tests.app.loop.pauses import LONGEST_S, LoopWatch, request_bytes, status_of, watched

CHATS, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SHARED_CORE = 3
"""Who shares a core takes up to twice the processor time for the same work. Alone, the longest pause here is .1 s."""
PATHS = "/a" * 2500
"""A text that vLLM's search for paths in error messages takes a second for."""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
RESPONSE = {"model": MODEL, "input": "Where is the red ball?", "max_output_tokens": 3}
MESSAGE = {"model": MODEL, "messages": CHAT["messages"], "max_tokens": 3}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}}


REPEATED: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {**CHAT, "tools": TOOLS, "tool_choice": PATHS}),
    (CHATS, {**CHAT, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": PATHS}}}),
    (CHATS, {**CHAT, "response_format": {"type": PATHS}}),
    (CHATS, {**CHAT, **schema({"type": PATHS})}),
    (CHATS, {**CHAT, **schema({"type": "string", "format": PATHS})}),
    (CHATS, {**CHAT, "logit_bias": {PATHS: 1}}),
    (CHATS, {**CHAT, "bad_words": ["", PATHS]}),
    (CHATS, {**CHAT, "structured_outputs": {PATHS: 1}}),
    (COMPLETIONS, {**COMPLETION, "logit_bias": {PATHS: 1}}),
    (COMPLETIONS, {**COMPLETION, **schema({"type": PATHS})}),
    (RESPONSES, {**RESPONSE, "logit_bias": {PATHS: 1}}),
    (RESPONSES, {**RESPONSE, "tools": [{"type": "function", "name": "f"}], "tool_choice": PATHS}),
    (
        RESPONSES,
        {**RESPONSE, "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": PATHS}}}},
    ),
    (
        MESSAGES,
        {
            **MESSAGE,
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": PATHS}}],
                },
                *CHAT["messages"],
            ],
        },
    ),
    (
        MESSAGES,
        {
            **MESSAGE,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": PATHS},
        },
    ),
    ("/v1/messages/count_tokens", {**MESSAGE, "thinking": {"type": PATHS}}),
    ("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": PATHS}),
    ("/detokenize", {"tokens": [PATHS]}),
    ("/api/v1/kv/pin", {"text": "x", PATHS: 1}),
    ("/api/v1/kv/diverge", {"first": {"text": "x", PATHS: 1}, "second": {"text": "y"}}),
    ("/api/v1/kv/fill", {"chunks": ["x"], PATHS: 1}),
    ("/api/v1/kv/clear", {"tiers": ["cpu"], PATHS: 1}),
]


@pytest.fixture(scope="module")
def watch(vllm_config) -> Iterator[LoopWatch]:
    gc.collect()
    gc.freeze()  # as an ingress has it (`app.serve_ingress`): else this process's other tests are walked through
    room = {"max_ongoing_requests": 2 * MANY, "max_queued_requests": 2 * MANY}
    agents = {"engine": {"tool_call_parser": "hermes"}, "model_aliases": ["a*a*a*a*a*a*a*a*a*b", "*-*-*-*-*-*-*-*-c"]}
    behind = backend(FakeReplicas(script=speak_at_length))
    with running(vllm_config, behind, **room, **agents) as server, watched(server) as loop:
        for body in (CHAT, CHAT, {**CHAT, **schema({"type": "object"})}):  # what the first request of all starts
            loop.longest_while(posted(CHATS, body))
        yield loop
    gc.unfreeze()


@pytest.fixture(scope="module")
def limit_s(watch: LoopWatch) -> float:
    """What is allowed on this machine: a control's pause, too, is what others make of it."""
    control_s, _ = watch.longest_while(posted(CHATS, CHAT))
    return LONGEST_S * SHARED_CORE * slowness() + control_s


def posted(path: str, body: Any) -> bytes:
    return request_bytes("POST", path, json.dumps(body).encode())


@pytest.mark.parametrize(("path", "body"), REPEATED, ids=lambda value: str(value)[-40:])
def test_a_text_that_an_error_repeats(watch: LoopWatch, limit_s: float, path: str, body: dict[str, Any]):
    pause_s, answer = watch.longest_while(posted(path, body), limit_s)
    assert status_of(answer) == 400, answer[:500]
    assert pause_s < limit_s


WORDS = [f"word {number}" for number in range(128)]
MANY = 700
COMPUTED: list[tuple[str, dict[str, Any], int]] = [
    (CHATS, {**CHAT, "bad_words": ["a" * 2_000_000]}, 400),
    (CHATS, {**CHAT, "bad_words": ["a" * 64] * 128}, 200),
    (CHATS, {**CHAT, "stop": ["a" * 2_000_000] * 4}, 400),
    (MESSAGES, {**MESSAGE, "stop_sequences": ["a" * 2_000_000] * 4}, 400),
    (CHATS, {**CHAT, "a" * 5_000_000: 1}, 400),
    (CHATS, {**CHAT, "logit_bias": {"1" * 4000: 1}}, 400),
    (CHATS, {**CHAT, "unknown": "a" * 9_000_000}, 200),
    (CHATS, {**CHAT, "unknown": list(range(100_000))}, 200),
    (CHATS, {**CHAT, "unknown": {str(number): 0 for number in range(50_000)}}, 200),
    (CHATS, {**CHAT, "messages": CHAT["messages"] * 4096}, 400),
    (RESPONSES, {**RESPONSE, "input": CHAT["messages"] * 4096}, 400),
    (COMPLETIONS, {**COMPLETION, "prompt": ["a"] * MANY}, 200),
    (COMPLETIONS, {**COMPLETION, "prompt": ["a"] * MANY, "bad_words": WORDS}, 200),
    (COMPLETIONS, {**COMPLETION, "prompt": ["a"] * MANY, "logit_bias": {str(token): 1 for token in range(1024)}}, 200),
    (COMPLETIONS, {**COMPLETION, "prompt": [[5] * 100] * MANY}, 200),
]


DESCRIBED = {"description": "It does a thing. " * 110, "parameters": {"type": "object", "properties": {"a": {}}}}
NAMED = [{"name": f"tool_{number}", **DESCRIBED} for number in range(1024)]
SERVER_BLOCK = {"type": "server_tool_use", "name": "web_search", "input": {"query": "a"}}
READ: list[tuple[str, dict[str, Any], int]] = [
    (CHATS, {**CHAT, "tools": [{"type": "function", "function": tool} for tool in NAMED]}, 200),
    (CHATS, {**CHAT, "tools": [{"type": "function", "function": tool} for tool in NAMED * 2]}, 400),
    (RESPONSES, {**RESPONSE, "tools": [{"type": "function", "strict": False, **tool} for tool in NAMED]}, 200),
    (RESPONSES, {**RESPONSE, "tools": [{"type": "function", "name": "f"}, *[{"type": PATHS[:2000]}] * 1000]}, 200),
    (MESSAGES, {**MESSAGE, "tools": [{"name": tool["name"], "input_schema": DESCRIBED} for tool in NAMED]}, 200),
    (MESSAGES, {**MESSAGE, "messages": [{"role": "user", "content": [SERVER_BLOCK] * 20_000}]}, 400),
    (
        MESSAGES,
        {
            **MESSAGE,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {"type": "base64", "media_type": "text/plain", "data": "QUFB" * 2_000_000},
                        }
                    ],
                }
            ],
        },
        400,
    ),
    (RESPONSES, {**RESPONSE, "input": [{"type": "web_search_call", "action": {"query": "a"}}] * 4096}, 400),
    (CHATS, {**CHAT, "model": "a-" * 500}, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), READ, ids=lambda value: str(value)[-40:])
def test_what_agents_send(watch: LoopWatch, limit_s: float, path: str, body: dict[str, Any], status: int):
    pause_s, answer = watch.longest_while(posted(path, body), limit_s)
    assert status_of(answer) == status, answer[:500]
    assert pause_s < limit_s


@pytest.mark.parametrize(("path", "body", "status"), COMPUTED, ids=lambda value: str(value)[-40:])
def test_a_text_or_a_list_that_is_worked_on(
    watch: LoopWatch, limit_s: float, path: str, body: dict[str, Any], status: int
):
    pause_s, answer = watch.longest_while(posted(path, body), limit_s)
    assert status_of(answer) == status, answer[:500]
    assert pause_s < limit_s


@pytest.mark.parametrize(
    "body",
    [b"[" + b"x" * 10_000_000, b'"\\"' * 3_300_000, b'{"a":' + b" " * 10_000_000 + b"1}", b"[" * 10_000_000],
    ids=["words", "quotes", "spaces", "brackets"],
)
def test_a_large_body_that_is_no_request(watch: LoopWatch, limit_s: float, body: bytes):
    pause_s, answer = watch.longest_while(request_bytes("POST", CHATS, body), limit_s)
    assert status_of(answer) == 400, answer[:500]
    assert pause_s < limit_s


LOGPROBS = {"logprobs": True, "top_logprobs": 20}
TOLD: list[tuple[str, dict[str, Any], int]] = [
    (CHATS, {**CHAT, **LOGPROBS, "n": 128, "max_tokens": 20}, 400),
    (CHATS, {**CHAT, **LOGPROBS, "n": 128, "max_tokens": 6}, 200),
    (CHATS, {**CHAT, "logprobs": True, "n": 128, "max_tokens": 120}, 200),
    (CHATS, {**CHAT, **LOGPROBS, "max_tokens": None, "n": 4}, 200),
    (CHATS, {**CHAT, **LOGPROBS, "n": 128, "max_tokens": 4, "stream": True}, 200),
    (COMPLETIONS, {**COMPLETION, "logprobs": 20, "n": 64, "max_tokens": 12}, 200),
    (COMPLETIONS, {**COMPLETION, "prompt": ["a"] * MANY, "logprobs": 3, "max_tokens": 10}, 200),
    (COMPLETIONS, {**COMPLETION, "prompt": [5] * 400, "prompt_logprobs": 20, "max_tokens": 1}, 200),
    (COMPLETIONS, {**COMPLETION, "prompt": [[5] * 400] * 3, "prompt_logprobs": 20, "max_tokens": 1}, 200),
    (COMPLETIONS, {**COMPLETION, "prompt": [[5] * 400] * 100, "prompt_logprobs": 20, "max_tokens": 1}, 400),
    (
        RESPONSES,
        {**RESPONSE, "max_output_tokens": 400, "top_logprobs": 20, "include": ["message.output_text.logprobs"]},
        200,
    ),
]


@pytest.mark.parametrize(("path", "body", "status"), TOLD, ids=lambda value: str(value)[-40:])
def test_an_answer_of_many_parts(watch: LoopWatch, limit_s: float, path: str, body: dict[str, Any], status: int):
    pause_s, answer = watch.longest_while(posted(path, body), limit_s)
    assert status_of(answer) == status, answer[:500]
    assert pause_s < limit_s
