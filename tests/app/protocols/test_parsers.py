"""Tools and reasoning: the parsers that the settings name, and what requests get without one."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from fake_backend import FakeReplicas, say
from ingress_server import CHAT, settings_with

from deployments.engine.engine_args import engine_args

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_the_engine_heeds_the_reasoning_parser() -> None:
    assert engine_args(settings_with(engine={"reasoning_parser": "qwen3"})).reasoning_parser == "qwen3"
    assert not engine_args(settings_with()).reasoning_parser


async def call(request: Any) -> Any:
    yield say(request, [10], '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', finished=True)


def test_without_a_parser_asking_for_automatic_tool_choice_is_400(start):
    server = start(FakeReplicas(call), engine={})
    with pytest.raises(openai.BadRequestError):
        server.client().chat.completions.create(**CHAT, tools=[TOOL], tool_choice="auto")
    assert not server.replicas.requests


def test_reasoning_is_told_apart_in_every_protocol(start):
    async def think(request: Any) -> Any:
        yield say(request, [10], "<think>Hm.</think>In Oslo.", finished=True)

    server = start(FakeReplicas(think), engine={"reasoning_parser": "qwen3"})
    asked = {"model": CHAT["model"], "max_tokens": 3, "messages": CHAT["messages"]}
    with server.http() as client:
        chat = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        response = client.post("/v1/responses", json={"model": CHAT["model"], "input": "Where?"}).json()["output"]
        message = client.post("/v1/messages", json=asked).json()["content"]
    assert (chat["reasoning"], chat["content"]) == ("Hm.", "In Oslo.")
    assert [item["type"] for item in response] == ["reasoning", "message"]
    assert [(block["type"], block.get("thinking") or block.get("text")) for block in message] == [
        ("thinking", "Hm."),
        ("text", "In Oslo."),
    ]
