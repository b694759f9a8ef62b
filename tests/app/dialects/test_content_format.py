"""The form that a template's texts come out whole in is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.dialects.templates import Format, content_format

Template = Callable[[list[dict[str, Any]]], str]


def renderer(template: Template, vllms: Format) -> Any:
    """A renderer whose own guess is `vllms`: it gives the template texts, or lists of parts."""

    def render_messages(messages: list[Any], params: Any) -> tuple[Any, Any]:
        form = params.chat_template_content_format
        wants_lists = (vllms if form == "auto" else form) == "openai"
        return messages, {"prompt": template([_in_form(dict(each), wants_lists) for each in messages])}

    return SimpleNamespace(render_messages=render_messages)


def _in_form(message: dict[str, Any], wants_lists: bool) -> dict[str, Any]:
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return {**message, "content": parts if wants_lists else "\n".join(part["text"] for part in parts)}


def prints(messages: list[dict[str, Any]]) -> str:
    return "".join(f"{each['role']}: {each['content']}" for each in messages)


def reads_parts(messages: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for each in messages for part in each["content"] if isinstance(part, dict))


def takes_both(messages: list[dict[str, Any]]) -> str:
    return "".join(each["content"] if isinstance(each["content"], str) else reads_parts([each]) for each in messages)


def knows_no_system(messages: list[dict[str, Any]]) -> str:
    if messages[0]["role"] == "system":
        raise ValueError("no system prompt here")
    return prints(messages)


def raises(messages: list[dict[str, Any]]) -> str:
    raise ValueError("no template")


@pytest.mark.parametrize(
    ("template", "vllms", "taken"),
    [
        (prints, "string", "auto"),
        (prints, "openai", "string"),
        (knows_no_system, "openai", "string"),
        (reads_parts, "openai", "auto"),
        (reads_parts, "string", "openai"),
        (takes_both, "string", "auto"),
        (takes_both, "openai", "auto"),
        (raises, "string", "auto"),
    ],
)
def test_the_form_is_taken_that_shows_the_texts_whole(template: Template, vllms: Format, taken: Format) -> None:
    assert content_format(renderer(template, vllms), None) == taken
