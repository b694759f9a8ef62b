"""Instructor: every answer is an object, by a tool that is called or by a JSON schema."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from cases import ASKED, CASES, CUT, KEY, MODEL, STEPS, TOKENS, TOLD, UNKNOWN, URL, Look, tell
from instructor.core import IncompleteOutputException, InstructorRetryException

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
BY_TOOL = instructor.from_openai(CLIENT, mode=instructor.Mode.TOOLS)
BY_SCHEMA = instructor.from_openai(CLIENT, mode=instructor.Mode.JSON_SCHEMA)
HOW: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "max_retries": 0}


def chat() -> str:
    return str(BY_TOOL.create(response_model=None, messages=ASKED, **HOW).choices[0].message.content)


def stream() -> list[str]:
    pieces = BY_TOOL.create(response_model=None, messages=ASKED, stream=True, **HOW)
    return [text for piece in pieces if piece.choices and (text := piece.choices[0].delta.content)]


def tools() -> list[str]:
    messages, places = [{"role": "user", "content": CASES["errand"]}], []
    for _ in range(STEPS):
        look, answer = BY_TOOL.create_with_completion(response_model=Look, messages=messages, **HOW)
        said = answer.choices[0].message
        places.append(look.place)
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": TOLD}
        messages += [said.model_dump(), result]
    return places


def structured() -> str:
    *_, last = BY_SCHEMA.create_partial(response_model=Look, messages=ASKED, **HOW)
    whole = BY_SCHEMA.create(response_model=Look, messages=ASKED, **HOW)
    assert last.place == whole.place
    return whole.place


def cut() -> str:
    try:
        BY_SCHEMA.create(response_model=Look, messages=ASKED, **{**HOW, "max_tokens": CUT})
    except IncompleteOutputException as raised:
        return str(raised.last_completion.choices[0].finish_reason)
    return "nothing was raised"


def error() -> list[Any]:
    try:
        BY_TOOL.create(response_model=Look, messages=ASKED, **{**HOW, "model": UNKNOWN})
    except InstructorRetryException as raised:
        return [raised.__cause__.status_code, str(raised)]  # type: ignore[union-attr]
    return ["nothing was raised"]


tell("instructor", chat, stream, tools, structured, cut, error)
