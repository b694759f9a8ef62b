"""By route, what changes its bodies; `app.gate.json_route` calls it once a body's sizes have been checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from app.dialects import asked, tools
from app.dialects.chats import read_chat, read_messages
from app.dialects.items import read_items

Body = dict[str, Any]
Reading = Callable[[Body], None]


class Readings:
    """The readings of one model's server. Stateless."""

    def __init__(
        self,
        model: str,
        aliases: Sequence[str],
        adapters: Collection[str],
        most_tokens: int,
        drop_media: bool,
        gap_marks: asked.GapMarks | None,
    ) -> None:
        """`model`: the name that it is served by; `adapters`: names of its adapters, which are no aliases, whatever the
        patterns say; `most_tokens`: of its context; `gap_marks`: `asked.gap_marks`."""
        self._model = model
        self._adapters = frozenset(adapters)
        self._aliases = tuple(aliases)
        self._most_tokens = most_tokens
        self._drop_media = drop_media
        self._gap_marks = gap_marks

    def by_path(self) -> Mapping[str, Reading]:
        """What changes the bodies of these routes in place; each raises VLLMValidationError (400) for what is wrong."""
        return {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._response,
            "/v1/responses/input_tokens": self._counted_response,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._message,
            "/tokenize": self._tokenized,
            "/detokenize": self._name,
        }

    def is_served(self, name: object) -> bool:
        """Whether the model itself is called so."""
        if isinstance(name, str) and name in self._adapters:
            return False
        return name == self._model or asked.is_alias(name, self._aliases)

    def _name(self, body: Body) -> None:
        if self.is_served(body.get("model")):
            body["model"] = self._model

    def _chat(self, body: Body) -> None:
        asked.require_model(body)
        self._tokenized(body)
        asked.hold_to_context(body, self._most_tokens)
        asked.let_greedy_answer_often(body)

    def _tokenized(self, body: Body) -> None:
        self._name(body)
        tools.read_empty(body)
        tools.read_chat(body)
        read_chat(body, self._drop_media)

    def _completion(self, body: Body) -> None:
        asked.require_model(body)
        asked.fill_gap(body, self._gap_marks)
        self._name(body)
        asked.hold_to_context(body, self._most_tokens)
        asked.let_greedy_answer_often(body)

    def _response(self, body: Body) -> None:
        asked.require_model(body)
        self._counted_response(body)

    def _counted_response(self, body: Body) -> None:
        asked.without_nulls(body)
        asked.without_hints_of_hosted_tools(body)
        self._name(body)
        tools.read_empty(body)
        tools.read_responses(body)
        read_items(body, self._drop_media)
        asked.hold_to_context(body, self._most_tokens)

    def _message(self, body: Body) -> None:
        asked.without_nulls(body)
        self._name(body)
        tools.read_empty(body)
        tools.read_messages(body)
        read_messages(body, self._drop_media)
        asked.hold_to_context(body, self._most_tokens)
