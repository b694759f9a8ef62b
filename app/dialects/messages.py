"""The messages of /v1/messages: blocks that hold text become text blocks, in what tools returned too."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from app.dialects.media import in_place_of, kind_of
from app.dialects.texts import text_of

Body = dict[str, Any]

_LONGEST_ARGUMENTS = 64 * 1024
"""Characters of a JSON text that are read; values in it are counted nowhere."""


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
                    block["input"] = _arguments(block.get("input"))


def _arguments(value: Any) -> dict[str, Any]:
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
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if (text := text_of(block)) is not None:
        return {"type": "text", "text": text}
    if drop and (kind := kind_of(block)) is not None:
        return in_place_of(kind, "text")
    return block
