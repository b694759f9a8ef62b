"""Finds where a prompt's last message begins, which other prompts may replace: one document, and many questions.

A chat template begins a message with a special token. Which one, and how often it comes again behind the last message,
is found out once, at start, from the renderings of two questions: they are alike up to the question. In a prompt it is
looked for from the end. So there is no second rendering, and no text is read. A client that writes the token into its
message moves the place: to one where a step may end as well as anywhere.

Leans on vLLM: `BaseRenderer.render_messages(messages, params)` and `ChatCompletionRequest.build_chat_params`, as
`app.openai.chat_renderer` does. On the ingress's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import BaseRenderer

from app.gate.prompt_extra import FrontParts, RouteParts, SendParts, Variant
from app.gate.request_context import RequestContext
from configs.settings import Settings
from deployments.protocol.wire import GenerateRequest
from kvmanager.extensions.states.landings import STATES
from kvmanager.segments.keys import Fidelity

logger = logging.getLogger(__name__)

_QUESTIONS: Final = ("Hello!", "Where is it?")
_BEFORE: Final = ({"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello to you."})


@dataclass(frozen=True, slots=True)
class MessageMark:
    """What begins a message in a model's prompts."""

    token: int
    behind: int
    """How often the token comes again behind the last message's beginning: where an answer is to begin."""

    def last_message(self, tokens: Sequence[int]) -> int:
        """Return the index of the token with which the last message begins; 0: not known. O(tokens), without Python."""
        backwards, at = tokens[::-1], -1
        try:
            for _ in range(self.behind + 1):
                at = backwards.index(self.token, at + 1)
        except ValueError:
            return 0
        return len(tokens) - 1 - at


class LastMessages:
    """A `PromptExtra`: the index of the token with which a prompt's last message begins."""

    def __init__(self, mark: MessageMark | None) -> None:
        """`mark`: None: it cannot be known, or no engine asks for it."""
        self._mark = mark

    async def of(self, request: GenerateRequest, user_salt: str | None, context: RequestContext) -> int | None:
        """See `PromptExtra`. None for a prompt of one message."""
        return self._mark.last_message(request.prompt_token_ids) or None if self._mark is not None else None

    def spans(self, token_ids: Sequence[int], fidelity: Fidelity) -> None:
        """See `PromptExtra`. Nothing is stored apart."""


class StatesIngress:
    """See the module's docstring: an `IngressExtension`."""

    variants: Mapping[Fidelity, Variant] = {}
    paths: frozenset[str] = frozenset()

    def __init__(self, settings: Settings) -> None:
        self._wanted = STATES in settings.kv.load_paths

    def extra(self, parts: FrontParts) -> LastMessages:
        """Make what finds last messages, for a model with states."""
        if not self._wanted or not parts.renderer.model_config.is_hybrid:
            return LastMessages(None)
        mark = message_mark(parts.renderer, parts.chat_template)
        if isinstance(mark, str):
            logger.info("no states are kept where a prompt's last message begins: %s", mark)
            return LastMessages(None)
        return LastMessages(mark)

    def preparation(self, parts: SendParts) -> None:
        """See `IngressExtension`. Nothing is computed before a prompt."""

    def router(self, extra: LastMessages, preparation: None, parts: RouteParts) -> None:
        """See `IngressExtension`. There are no routes."""


def message_mark(renderer: BaseRenderer, chat_template: str | None) -> MessageMark | str:
    """Return what begins a message of this model's chats, or, in words, why it cannot be known. Does not raise."""
    tokenizer: Any = renderer.tokenizer
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not added:
        return "the tokenizer has no special tokens, or does not say which they are"

    def tokens(*messages: dict[str, str]) -> list[int]:
        request = ChatCompletionRequest.model_validate({"messages": list(messages)})
        params = request.build_chat_params(chat_template, "auto").with_defaults({"tools": None, "tokenize": False})
        _, prompt = renderer.render_messages(request.messages, params)
        text: Any = prompt["prompt"]  # type: ignore[typeddict-item]
        return list(tokenizer.encode(text, add_special_tokens=False))

    def asked(*before: dict[str, str]) -> tuple[list[int], int]:
        """A prompt's tokens, and how many come before its question."""
        first, second = (tokens(*before, {"role": "user", "content": question}) for question in _QUESTIONS)
        pairs = zip(first, second, strict=False)
        return first, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    try:
        alone, question = asked()
        place = next((at for at in range(question - 1, -1, -1) if alone[at] in added), None)
        if place is None:
            return "no special token begins a message in its chat template"
        mark = MessageMark(alone[place], alone[question:].count(alone[place]))
        later, question = asked(*_BEFORE)
        if not 0 < mark.last_message(later) <= question:
            return f"token {mark.token} does not begin every message in its chat template"
        return mark
    except Exception as error:
        return f"its chat template does not render a plain conversation ({type(error).__name__})"


def build(settings: Settings) -> StatesIngress:
    """Make it."""
    return StatesIngress(settings)
