"""The prompts that are being answered now: for the list of them, and for orders to move one.

Ids: each has one of its own, which the list shows. The id that a client sees in its answer works too, unless several
live requests have it, for clients may choose theirs. On the ingress's event loop; as many entries as there are turns.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.continuation.generated_tokens import GeneratedTokens
from deployments.protocol.wire import Progress
from kvmanager.routing.roles import Phase

_OF_SEVERAL_PROMPTS = re.compile(r"(cmpl-.*)-\d+|(resp_.*)_\d+")


class Movable(Protocol):
    """The attempts at one prompt: `app.openai.retries.RetryingStream`."""

    answered: GeneratedTokens
    progress: Progress
    """Of the attempt under way."""

    @property
    def replica(self) -> str:
        """The unique name of the one that works on it; empty: none yet."""
        ...

    @property
    def resumed(self) -> int:
        """How often it went on elsewhere."""
        ...

    @property
    def phase(self) -> Phase:
        """What it goes on as elsewhere."""
        ...

    def leave(self, reason: str, target: str = "") -> None:
        """End the attempt under way, and go on elsewhere: at the replica with this unique name, or at any."""
        ...


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One prompt: `request_id` is its own id, `answer_id` what its client sees."""

    request_id: str
    answer_id: str
    tenant: str
    prompt_tokens: int
    attempts: Movable
    began: float = field(default_factory=time.monotonic)

    def report(self, rank_of: Callable[[str], int | None]) -> dict[str, Any]:
        """For the list; `rank_of`: from a replica's unique name to its number."""
        answered = self.attempts.answered
        return {
            "id": self.request_id,
            "answer_id": self.answer_id,
            "tenant": self.tenant,
            "replica": rank_of(self.attempts.replica),
            "prompt_tokens": self.prompt_tokens,
            "tokens": answered.num_tokens,
            "seconds": round(time.monotonic() - self.began, 3),
            "streamed": answered.streams,
            "resumed": self.attempts.resumed,
            "not_movable": answered.why_not_moved(),
        }


def answer_id(request_id: str) -> str:
    """What a client sees, of the id that vLLM's serving classes give one of its prompts."""
    of_several = _OF_SEVERAL_PROMPTS.fullmatch(request_id)
    return of_several[1] or of_several[2] if of_several else request_id


class LiveRequests:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}

    def add(self, request: LiveRequest) -> Callable[[], None]:
        """It has its turn. Returns what is to be called at its end."""
        self._live[request.request_id] = request

        def end() -> None:
            self._live.pop(request.request_id, None)

        return end

    def all(self) -> list[LiveRequest]:
        """The oldest first."""
        return list(self._live.values())

    def find(self, name: str) -> list[LiveRequest]:
        """Those that have this id, or whose answers have."""
        own = self._live.get(name)
        return [own] if own is not None else [one for one in self._live.values() if one.answer_id == name]
