"""Messages of the system and of the developer in the middle of a conversation stay where they stand.

For a template that does not know the role `developer`, vLLM moves all of them into one at the head. An agent that sends
one late (another folder, other permissions) then has another head in its next prompt, and the KV of the whole
conversation is computed again. Where the template prints a system message in its place, it is given one there.

Leans on vLLM: `BaseRenderer.render_messages(messages, params)`; a conversation without the role `developer` is rendered
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import BaseRenderer

from app.dialects.content_format import Format

Message = dict[str, Any]

_ORDERS = ("system", "developer")
_HEAD: list[Message] = [
    {"role": "system", "content": "Argentum system."},
    {"role": "user", "content": "Beryllium question?"},
    {"role": "assistant", "content": "Cadmium answer."},
]
_LATE, _ASKED = "Dysprosium order.", {"role": "user", "content": "Erbium question?"}


def prints_system_in_place(renderer: BaseRenderer, chat_template: str | None, form: Format) -> bool:
    """Whether late orders are to be given to the template as the system's. Does not raise.

    Not where it knows developers, and not where a late system message would be moved, left out or refused.
    """
    return not _in_place(renderer, chat_template, form, "developer") and _in_place(
        renderer, chat_template, form, "system"
    )


def _in_place(renderer: BaseRenderer, chat_template: str | None, form: Format, role: str) -> bool:
    late = [*_HEAD, {"role": role, "content": _LATE}, _ASKED]
    try:
        before, behind = (_rendered(renderer, chat_template, form, each) for each in (_HEAD, late))
    except Exception:  # whatever a template raises
        return False
    return behind.startswith(before) and _LATE in behind[len(before) :]


def _rendered(renderer: BaseRenderer, chat_template: str | None, form: Format, messages: list[Message]) -> str:
    request = ChatCompletionRequest.model_validate({"messages": messages, "add_generation_prompt": False})
    params = request.build_chat_params(chat_template, form).with_defaults({"tools": None, "tokenize": False})
    _, prompt = renderer.render_messages(request.messages, params)
    text: Any = prompt.get("prompt")
    return str(text)


def in_place(messages: Sequence[Any]) -> list[Any]:
    """The messages with late orders as the system's, and one system message of those at the head, as vLLM makes it.

    Where no order is late, or none is a developer's, they are as they were.
    """
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    head = len(list(takewhile(lambda role: role in _ORDERS, roles)))
    if "developer" not in roles or not any(role in _ORDERS for role in roles[head:]):
        return list(messages)
    texts = [text for message in messages[:head] if (text := _text(message.get("content")))]
    first = [{"role": "system", "content": "\n\n".join(texts)}] if head else []
    return [*first, *(_as_system(message) for message in messages[head:])]


def _as_system(message: Any) -> Any:
    return (
        {**message, "role": "system"} if isinstance(message, dict) and message.get("role") == "developer" else message
    )


def _text(content: Any) -> str:
    if not isinstance(content, list | tuple):
        return content if isinstance(content, str) else ""
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "\n".join(text for text in texts if isinstance(text, str))
