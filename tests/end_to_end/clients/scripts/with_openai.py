"""OpenAI's client, chat completions."""

from __future__ import annotations

import json
from typing import Any

import openai
from cases import ASKED, CASES, CUT, KEY, MODEL, STEPS, TOKENS, TOLD, TOOL, UNKNOWN, URL, Look, refused, tell

CHATS = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY).chat.completions
HOW: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_completion_tokens": TOKENS}


def chat() -> str:
    return CHATS.create(messages=ASKED, **HOW).choices[0].message.content or ""


def stream() -> list[str]:
    with CHATS.stream(messages=ASKED, **HOW) as events:
        return [event.delta for event in events if event.type == "content.delta"]


def tools() -> list[str]:
    messages, places = [{"role": "user", "content": CASES["errand"]}], []
    for _ in range(STEPS):
        answer: Any = CHATS.create(
            messages=messages, tools=[{"type": "function", "function": TOOL}], tool_choice="required", **HOW
        )
        (call,) = answer.choices[0].message.tool_calls
        places.append(json.loads(call.function.arguments)["place"])
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    return places


def structured() -> str:
    answer = CHATS.parse(messages=ASKED, response_format=Look, **HOW).choices[0].message.parsed
    assert answer
    return answer.place


def cut() -> str:
    return CHATS.create(messages=ASKED, **{**HOW, "max_completion_tokens": CUT}).choices[0].finish_reason


def error() -> list[Any]:
    return refused(openai.NotFoundError, lambda: CHATS.create(messages=ASKED, **{**HOW, "model": UNKNOWN}))


tell("openai", chat, stream, tools, structured, cut, error)
