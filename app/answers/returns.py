"""Learns which answers come back, and says why one did not: what a template strips from history is not worth being
stored.

The ingress sees it when a conversation goes on: the answer is in the new prompt as it was sampled, or it is not. That
is seen whether or not the answer's KV was stored, so nothing has to be stored for the sake of finding out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from app.gate.observed_prompt import Kind
from app.metrics.labels import CHANGED_BY_CLIENT, CHANGED_BY_TEMPLATE, TOOL_CALL

Saving = Literal["auto", "always", "never"]
"""The setting `kv.save_answers`."""

WORTH_SAVING = 0.1
"""The share that must come back. Storing an answer costs some hundredth of computing it again."""
_KEPT = 0.98
"""What a vote weighs after the next one: some 50 count."""
_START = 8.0
"""Votes that an unknown kind begins with: its answers are stored until experience says otherwise, 42 times."""


class Returns:
    """Shares of answers that come back, by their kind. There are four kinds for each tenant."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._votes: dict[Kind, tuple[float, float]] = {}

    def see(self, kind: Kind, came_back: bool) -> None:
        """A conversation has gone on after an answer of this kind."""
        back, gone = self._votes.get(kind, (_START, 0.0))
        self._votes[kind] = _KEPT * back + came_back, _KEPT * gone + (not came_back)

    def share(self, kind: Kind) -> float:
        """The decayed share of such answers that came back; 1 without experience."""
        back, gone = self._votes.get(kind, (_START, 0.0))
        return back / (back + gone)

    def worth_saving(self, kind: Kind | None) -> bool:
        """Whether to store the KV of such an answer; None: it is no chat's, and nothing is learned of it."""
        if self._saving == "auto" and kind is not None:
            return self.share(kind) >= WORTH_SAVING
        return self._saving != "never"


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
