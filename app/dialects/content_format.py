"""Whether a chat template wants a message's content as one text or as a list of parts.

vLLM guesses by reading the template, and takes some for ones that want lists which then print the list: the model reads
`[{'type': 'text', …`. So a few conversations are rendered at the start, in vLLM's way first and then in the
others, and the way is taken that shows most of them whole.

Leans on vLLM: `BaseRenderer.render_messages(messages, params)`; `ChatCompletionRequest.build_chat_params`.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import BaseRenderer

logger = logging.getLogger(__name__)

Format = Literal["auto", "string", "openai"]
"""`auto`: as vLLM guesses."""
_FORMATS: tuple[Format, ...] = ("auto", "string", "openai")
_SYSTEM, _ASKED, _ANSWERED, _PART = "Argentum system.", "Beryllium question?", "Cadmium answer.", "Dysprosium part."
_PARTS = [{"type": "text", "text": _ASKED}, {"type": "text", "text": _PART}]
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _ASKED}],
    [{"role": "user", "content": _PARTS}],
    [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": _ANSWERED},
        {"role": "user", "content": _PART},
    ],
)
_PRINTED = ("'text'", '"text"', "&#39;text&#39;")
"""What a list of parts leaves in a text."""


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


def _is_whole(renderer: BaseRenderer, chat_template: str | None, form: Format, messages: list[dict[str, Any]]) -> bool:
    request = ChatCompletionRequest.model_validate({"messages": messages})
    params = request.build_chat_params(chat_template, form).with_defaults({"tools": None, "tokenize": False})
    try:
        _, prompt = renderer.render_messages(request.messages, params)
    except Exception:  # whatever a template raises, for instance for a system prompt
        return False
    text: Any = prompt.get("prompt")
    if not isinstance(text, str) or any(printed in text for printed in _PRINTED):
        return False
    contents = [message["content"] for message in messages]
    texts = [part["text"] for content in contents if isinstance(content, list) for part in content]
    return all(each in text for each in (*texts, *(content for content in contents if isinstance(content, str))))
