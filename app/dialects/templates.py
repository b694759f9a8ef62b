"""What a model's chat template makes of messages, found by rendering a few at the start, and what it is given for that.

A template wants a message's content as one text or as a list of parts. vLLM guesses by reading the template, and takes
some for ones that want lists which then print the list: the model reads `[{'type': 'text', …`. So the way is taken,
vLLM's first and then the others, that shows most conversations whole.

Messages of the system and of the developer in the middle of a conversation stay where they stand. For a template that
does not know the role `developer`, vLLM moves all of them into one at the head. An agent that sends one late (another
folder, other permissions) then has another head in its next prompt, and the KV of the whole conversation is computed
again. Where the template prints a system message in its place, it is given one there.

Leans on vLLM: `BaseRenderer.render_messages(messages, params)`; `ChatCompletionRequest.build_chat_params`; a
conversation without the role `developer` is rendered as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import BaseRenderer

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Format = Literal["auto", "string", "openai"]
"""`auto`: as vLLM guesses."""
_FORMATS: tuple[Format, ...] = ("auto", "string", "openai")
_SYSTEM: Message = {"role": "system", "content": "Argentum system."}
_ASKED: Message = {"role": "user", "content": "Beryllium question?"}
_ANSWERED: Message = {"role": "assistant", "content": "Cadmium answer."}
_LATE = "Dysprosium order."
_AGAIN: Message = {"role": "user", "content": "Erbium question?"}
_PARTS = [{"type": "text", "text": each["content"]} for each in (_ASKED, _AGAIN)]
_CONVERSATIONS: tuple[list[Message], ...] = (
    [_SYSTEM, _ASKED],
    [{"role": "user", "content": _PARTS}],
    [_ASKED, _ANSWERED, _AGAIN],
)
_PRINTED = ("'text'", '"text"', "&#39;text&#39;")
"""What a list of parts leaves in a text."""
_ORDERS = ("system", "developer")


def content_format(renderer: BaseRenderer, chat_template: str | None) -> Format:
    """What to tell vLLM. Does not raise: a template that renders nothing is vLLM's to refuse."""
    whole = {each: _whole(renderer, chat_template, each) for each in _FORMATS}
    best = max(_FORMATS, key=lambda each: whole[each])  # the first of equals: vLLM's own way
    if best != "auto":
        logger.warning("the chat template prints lists: contents are given to it in the format %r", best)
    return best


def _whole(renderer: BaseRenderer, chat_template: str | None, form: Format) -> int:
    """How many conversations come out with all of their texts, and nothing of their form."""
    return sum(_is_whole(renderer, chat_template, form, messages) for messages in _CONVERSATIONS)


def _is_whole(renderer: BaseRenderer, chat_template: str | None, form: Format, messages: list[Message]) -> bool:
    try:
        text = _rendered(renderer, chat_template, form, {"messages": messages})
    except Exception:  # whatever a template raises, for instance for a system prompt
        return False
    if any(printed in text for printed in _PRINTED):
        return False
    contents = [message["content"] for message in messages]
    texts = [part["text"] for content in contents if isinstance(content, list) for part in content]
    return all(each in text for each in (*texts, *(content for content in contents if isinstance(content, str))))


def prints_system_in_place(renderer: BaseRenderer, chat_template: str | None, form: Format) -> bool:
    """Whether late orders are to be given to the template as the system's. Does not raise.

    Not where it knows developers, and not where a late system message would be moved, left out or refused.
    """
    return not _in_place(renderer, chat_template, form, "developer") and _in_place(
        renderer, chat_template, form, "system"
    )


def _in_place(renderer: BaseRenderer, chat_template: str | None, form: Format, role: str) -> bool:
    head = [_SYSTEM, _ASKED, _ANSWERED]
    late = [*head, {"role": role, "content": _LATE}, _AGAIN]
    chats = ({"messages": each, "add_generation_prompt": False} for each in (head, late))
    try:
        before, behind = (_rendered(renderer, chat_template, form, each) for each in chats)
    except Exception:  # whatever a template raises
        return False
    return behind.startswith(before) and _LATE in behind[len(before) :]


def _rendered(renderer: BaseRenderer, chat_template: str | None, form: Format, chat: dict[str, Any]) -> str:
    request = ChatCompletionRequest.model_validate(chat)
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
