"""Why an answer has not come back as it was sampled: what the next prompt says about it, and what is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.metrics.labels import CHANGED_BY_CLIENT, CHANGED_BY_TEMPLATE, TOOL_CALL


class History:
    """The messages of a request, for what the counters say of it."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages

    @property
    def has_answers(self) -> bool:
        """Whether there is an answer among them."""
        return any(_field(message, "role") == "assistant" for message in self._messages)

    def cause(self, sampled: str) -> str:
        """Of `app.metrics.labels.RETURNS`, for an answer with the text `sampled` of which the prompt has another text.

        The last answer among the messages is taken for it: those before were seen in earlier prompts.
        """
        answers = (message for message in reversed(self._messages) if _field(message, "role") == "assistant")
        message = next(answers, None)
        if message is None:
            return CHANGED_BY_CLIENT
        if _field(message, "tool_calls"):
            return TOOL_CALL
        content = _field(message, "content")
        if isinstance(content, str) and content.strip() and content.strip() in sampled:
            return CHANGED_BY_TEMPLATE  # or by a parser: the client says what it was told
        return CHANGED_BY_CLIENT


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)
