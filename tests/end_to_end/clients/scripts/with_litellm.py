"""LiteLLM, as its proxy and many agents call it: a chat of OpenAI's."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one

import litellm
from cases import ASKED, CASES, CUT, KEY, MODEL, STEPS, TOKENS, TOLD, TOOL, UNKNOWN, URL, Look, refused, tell

HOW: dict[str, Any] = {
    "model": f"hosted_vllm/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "temperature": 0,
    "max_tokens": TOKENS,
}


def ask(messages: list[Any], **more: Any) -> Any:
    return litellm.completion(messages=messages, **{**HOW, **more})


def chat() -> str:
    return str(ask(ASKED).choices[0].message.content)


def stream() -> list[str]:
    pieces = [chunk.choices[0].delta.content for chunk in ask(ASKED, stream=True) if chunk.choices]
    return [piece for piece in pieces if piece]


def tools() -> list[str]:
    messages, places = [{"role": "user", "content": CASES["errand"]}], []
    for _ in range(STEPS):
        said = ask(messages, tools=[{"type": "function", "function": TOOL}], tool_choice="required").choices[0].message
        (call,) = said.tool_calls
        places.append(json.loads(call.function.arguments)["place"])
        messages += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    return places


def structured() -> str:
    return Look.model_validate_json(ask(ASKED, response_format=Look).choices[0].message.content).place


def cut() -> str:
    return str(ask(ASKED, max_tokens=CUT).choices[0].finish_reason)


def error() -> list[Any]:
    return refused(litellm.NotFoundError, lambda: ask(ASKED, model=f"hosted_vllm/{UNKNOWN}"))


tell("litellm", chat, stream, tools, structured, cut, error)
