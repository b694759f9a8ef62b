"""The messages of chats and of /v1/messages, as agents keep them: null contents, objects as arguments, other APIs'
parts.

Of a chat, an assistant's parts `reasoning` and `tool_use` go where a chat has them: `reasoning` and `tool_calls` of the
message. A `tool_result` in a user's message becomes a message of the tool. Of /v1/messages, blocks that hold text
become text blocks, in what tools returned too.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from vllm.exceptions import VLLMValidationError

from app.dialects.parts import in_place_of, kind_of, text_of

Body = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING = ("reasoning", "thinking", "redacted_thinking")
_LONGEST_ARGUMENTS = 64 * 1024
"""Characters of a JSON text that are read; values in it are counted nowhere."""


def read_chat(body: Body, drop_media: bool) -> None:
    """Change `messages` in place. Raises VLLMValidationError (400) for a role that no chat has."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    read: list[Any] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            read.append(message)
            continue
        role = message.get("role")
        if isinstance(role, str) and role not in ROLES:
            raise VLLMValidationError(
                f"`messages.{number}.role` must be one of {', '.join(ROLES)}.", parameter=f"messages.{number}.role"
            )
        if message.get("content", "") is None and role in ("tool", "function"):
            message["content"] = ""
        if isinstance(message.get("content"), list):
            earlier = number < len(messages) - 1 or role in ("tool", "function")
            read += _with_parts(message, drop=drop_media and earlier)
        else:
            read.append(message)
        _read_calls(message)
    body["messages"] = read


def _with_parts(message: Body, *, drop: bool) -> list[Body]:
    """The message with its parts read, behind those of tools whose results stand in it."""
    role, parts, reasoning, calls, results = message.get("role"), [], [], [], []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if role == "assistant" and kind in _REASONING and "text" not in _text_fields(part, kind):
            reasoning.append(_reasoning(part))
        elif role == "assistant" and kind == "tool_use":
            calls.append(_call(part))
        elif role == "user" and kind == "tool_result":
            results.append(_result(part, drop))
        else:
            parts.append(_part(part, drop))
    if not (reasoning or calls or results):
        message["content"] = parts
        return [message]
    message["content"] = parts or None
    if reasoning and not isinstance(message.get("reasoning"), str):
        message["reasoning"] = "\n".join(filter(None, reasoning))
    if calls:
        given = message.get("tool_calls")
        message["tool_calls"] = [*(given if isinstance(given, list) else ()), *calls]
    return results if role == "user" and not parts else [*results, message]


def _text_fields(part: Body, kind: object) -> tuple[str, ...]:
    """`thinking` is a part that vLLM reads as it stands, as text, where it says `thinking`."""
    return ("text",) if kind == "thinking" and isinstance(part.get("thinking"), str) else ()


def _reasoning(part: Body) -> str:
    for name in ("text", "reasoning", "thinking", "content", "summary"):
        if isinstance(part.get(name), str):
            return str(part[name])
        if isinstance(part.get(name), list):
            return "\n".join(one["text"] for one in part[name] if isinstance(one, dict) and _is_text(one.get("text")))
    return ""


def _call(part: Body) -> Body:
    function = {"name": part.get("name"), "arguments": _arguments(part.get("input"))}
    return {"id": part.get("id"), "type": "function", "function": function}


def _result(part: Body, drop: bool) -> Body:
    content = part.get("content")
    if isinstance(content, list):
        content = [_part(one, drop) for one in content]
    return {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": "" if content is None else content}


def _part(part: Any, drop: bool) -> Any:
    if (text := text_of(part)) is not None:
        return {"type": "text", "text": text}
    if drop and (kind := kind_of(part)) is not None:
        return in_place_of(kind, "text")
    return part


def _read_calls(message: Body) -> None:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function.get("arguments"))


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps({} if value is None else value, ensure_ascii=False)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def read_messages(body: Body, drop_media: bool) -> None:
    """Change the blocks of `system` and `messages` in place."""
    if isinstance(body.get("system"), list):
        body["system"] = _blocks(body["system"], drop=False)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    for message in messages:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message["content"] = _blocks(message["content"], drop=drop_media and message is not messages[-1])
            for block in message["content"]:
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    _read_result(block, drop_media)
                elif isinstance(block, dict) and block.get("type") == "tool_use":
                    block["input"] = _input(block.get("input"))


def _input(value: Any) -> dict[str, Any]:
    """What a tool was called with, also where a client kept it as a text, whole or cut."""
    if isinstance(value, str) and len(value) <= _LONGEST_ARGUMENTS:
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(value)
            json.dumps(read, ensure_ascii=False).encode()  # half of a surrogate pair is no text
            value = read
    return value if isinstance(value, dict) else {} if value is None else {"input": value}


def _read_result(block: Body, drop_media: bool) -> None:
    content = block.get("content")
    if isinstance(content, dict):
        content = [content]
    if isinstance(content, list):
        block["content"] = _blocks(content, drop=drop_media)


def _blocks(blocks: list[Any], *, drop: bool) -> list[Any]:
    return [_block(block, drop) for block in blocks]


def _block(block: Any, drop: bool) -> Any:
    return {"type": "text", "text": block} if isinstance(block, str) else _part(block, drop)
