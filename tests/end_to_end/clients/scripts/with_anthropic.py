"""Anthropic's client."""

from __future__ import annotations

from typing import Any

import anthropic
from cases import CASES, CUT, KEY, MODEL, STEPS, TOKENS, TOLD, TOOL, UNKNOWN, URL, Look, refused, tell

MESSAGES = anthropic.Anthropic(base_url=URL, api_key=KEY).messages
ASKED: dict[str, Any] = {"system": CASES["system"], "messages": [{"role": "user", "content": CASES["question"]}]}
GREEDY = {"temperature": 0}  # the newest clients have no such argument
HOW: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "extra_body": GREEDY}


def chat() -> str:
    return "".join(block.text for block in MESSAGES.create(**ASKED, **HOW).content if block.type == "text")


def stream() -> list[str]:
    with MESSAGES.stream(**ASKED, **HOW) as events:
        return list(events.text_stream)


def tools() -> list[str]:
    messages, places = [{"role": "user", "content": CASES["errand"]}], []
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    for _ in range(STEPS):
        answer: Any = MESSAGES.create(messages=messages, tools=[tool], tool_choice={"type": "any"}, **HOW)
        assert answer.stop_reason == "tool_use"
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        places.append(call.input["place"])
        returned = {"type": "tool_result", "tool_use_id": call.id, "content": TOLD}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [returned]}]
    return places


def structured() -> str:
    answer: Any = MESSAGES.parse(**ASKED, output_format=Look, **HOW)
    return str(answer.parsed_output.place)


def cut() -> str:
    return str(MESSAGES.create(**ASKED, **{**HOW, "max_tokens": CUT}).stop_reason)


def error() -> list[Any]:
    return refused(anthropic.NotFoundError, lambda: MESSAGES.create(**ASKED, **{**HOW, "model": UNKNOWN}))


tell("anthropic", chat, stream, tools, structured, cut, error)
