"""OpenAI's client, Responses."""

from __future__ import annotations

import json
from typing import Any

import openai
from cases import CASES, CUT, KEY, MODEL, STEPS, TOKENS, TOLD, TOOL, UNKNOWN, URL, Look, refused, tell

RESPONSES = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY).responses
ASKED: dict[str, Any] = {"instructions": CASES["system"], "input": CASES["question"]}
HOW: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": TOKENS}


def chat() -> str:
    return RESPONSES.create(**ASKED, **HOW).output_text


def stream() -> list[str]:
    with RESPONSES.stream(**ASKED, **HOW) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert events.get_final_response().output_text == "".join(pieces)
        return pieces


def tools() -> list[str]:
    items, places = [{"role": "user", "content": CASES["errand"]}], []
    tool = {"type": "function", "strict": True, **TOOL}
    for _ in range(STEPS):
        answer: Any = RESPONSES.create(input=items, tools=[tool], tool_choice="required", **HOW)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        places.append(json.loads(call.arguments)["place"])
        items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": TOLD}]
    return places


def structured() -> str:
    answer = RESPONSES.parse(**ASKED, text_format=Look, **HOW).output_parsed
    assert answer
    return answer.place


def cut() -> str:
    answer = RESPONSES.create(**ASKED, **{**HOW, "max_output_tokens": CUT})
    assert answer.status == "incomplete"
    assert answer.incomplete_details
    return str(answer.incomplete_details.reason)


def error() -> list[Any]:
    return refused(openai.NotFoundError, lambda: RESPONSES.create(**ASKED, **{**HOW, "model": UNKNOWN}))


tell("openai", chat, stream, tools, structured, cut, error)
