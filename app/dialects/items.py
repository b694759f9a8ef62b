"""The items of a Responses' `input`: untyped and empty ones, nulls, and what another server's tools did.

A hosted tool's call in the history becomes a function's, with its output behind it where it has one: a model knows
calls, and a chat template has its place for them. What cannot be read here is left out: what is encrypted, lists of
tools, approvals.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.exceptions import VLLMValidationError

from app.dialects.parts import in_place_of, in_words, kind_of, text_of
from app.gate.not_done import KEEPS_NOTHING
from app.gate.request_context import current_request

Item = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_SAY_NOTHING = frozenset(
    {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction_trigger", "configuration_update"}
)
_ENCRYPTED = ("compaction", "context_compaction")
_WITH_OUTPUT = ("output", "outputs", "results", "error")
"""Fields of a hosted call that say what came of it."""


def read_items(body: Item, drop_media: bool) -> None:
    """Change `input` in place. Raises VLLMValidationError (400) for an item that nothing is known of."""
    items = body.get("input")
    if isinstance(items, dict):
        items = [items]
    if not isinstance(items, list):
        return
    read: list[Any] = []
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            read.append(item)
            continue
        given = {name: value for name, value in item.items() if value is not None}
        last = number == len(items) - 1
        read += _read(given, number, drop_media and not last, drop_media)
    body["input"] = read


def _read(item: Item, number: int, drop: bool, drop_output: bool) -> list[Item]:
    kind = item.get("type", "message" if "role" in item else "")
    if not isinstance(kind, str):
        kind = ""
    if kind == "message" or (kind in _TEXTS and "role" in item):
        return _message(item, number, drop)
    if kind == "reasoning":
        return _reasoning(item)
    if kind == "function_call":
        arguments = item.get("arguments", {})
        return [{**item, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}]
    if kind in _OUTPUTS:
        return [{**item, "output": _output(item.get("output", ""), drop_output)}]
    if kind in _CALLS:
        return [item]
    if kind in _TEXTS and isinstance(item.get("text"), str):
        return [{"role": "user", "content": item["text"]}]
    if kind == "item_reference":
        raise VLLMValidationError(f"`input.{number}` is an `item_reference`. {KEEPS_NOTHING}", parameter="input")
    if kind in _SAY_NOTHING:
        return []
    if kind in _ENCRYPTED:
        current_request().left_out.note("encrypted", kind)
        return []
    if kind.endswith(("_call", "_output")):
        return _hosted(item, kind, number)
    raise VLLMValidationError(
        f"`input.{number}` is no item that is known here: give messages, function calls and their outputs.",
        parameter="input",
    )


def _message(item: Item, number: int, drop: bool) -> list[Item]:
    content = item.get("content")
    if item.get("role") != "assistant":
        if isinstance(content, list):
            content = [_part(part, drop) for part in content]
        return [{**item, "content": content}] if content else []
    if isinstance(content, str):
        return [item]
    texts = [_text(part) for part in content] if isinstance(content, list) else []
    if None in texts:
        raise VLLMValidationError(
            f"`input.{number}.content` is an assistant's, and has a part that is no text.", parameter="input"
        )
    if not texts:
        return []
    told = {"type": "output_text", "text": "".join(filter(None, texts)), "annotations": []}
    return [{"id": f"msg_{number}", "status": "completed", **item, "type": "message", "content": [told]}]


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return None
    for name in ("text", "refusal"):
        if isinstance(part.get(name), str):
            return str(part[name])
    return text_of(part)


def _part(part: Any, drop: bool) -> Any:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "input_text", "text": part["text"]}
    if (text := text_of(part)) is not None:
        return {"type": "input_text", "text": text}
    if drop and (kind := kind_of(part)) is not None:
        return in_place_of(kind, "input_text")
    return part


def _output(output: Any, drop: bool) -> Any:
    if isinstance(output, list):
        return [_part(part, drop) for part in output]
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def _reasoning(item: Item) -> list[Item]:
    """What was thought, in one part: the whole of it where it was sent, else its summary."""
    if "encrypted_content" in item:
        current_request().left_out.note("encrypted", "reasoning")
    thought = _joined(item.get("content")) or _joined(item.get("summary"))
    if not thought:
        return []
    kept: Item = {name: item[name] for name in ("id", "status") if name in item}
    content = [{"type": "reasoning_text", "text": thought}]
    return [{"id": "rs_0", **kept, "type": "reasoning", "summary": [], "content": content}]


def _joined(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    texts = [_text(part) for part in parts] if isinstance(parts, list) else []
    return "\n".join(filter(None, texts))


def _hosted(item: Item, kind: str, number: int) -> list[Item]:
    """A hosted tool's call, or what came of one, as a function's."""
    call_id = next((item[name] for name in ("call_id", "id") if isinstance(item.get(name), str)), f"call_{number}")
    if kind.endswith("_output"):
        return [_returned(call_id, item.get("output", item.get("tools", "")))]
    name = item.get("name") if isinstance(item.get("name"), str) else kind.removesuffix("_call")
    asked = {key: value for key, value in item.items() if key not in (*_WITH_OUTPUT, "name", "server_label")}
    arguments = asked["arguments"] if isinstance(asked.get("arguments"), str) else in_words(asked)
    call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    outcome = {key: item[key] for key in _WITH_OUTPUT if key in item}
    if not outcome:
        return [call]
    return [call, _returned(call_id, next(iter(outcome.values())) if len(outcome) == 1 else outcome)]


def _returned(call_id: str, output: Any) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": in_words(output)}
