"""A prompt as those see it who want to know of each: what it is when it comes, each of its outputs, and how it ended.

An observer changes nothing of a prompt on its way, and a prompt is answered whatever becomes of it: what `begin`,
`hear` and `end` do must neither raise nor wait. On the ingress's event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from app.gate.request_context import RequestContext
    from app.metrics.stages import RequestStages
    from deployments.protocol.wire import GenerateRequest


class Kind(NamedTuple):
    """What is known of an answer before it is sampled, by which it is learned whether such answers come back."""

    tenant: str
    thinks: bool = False
    """A reasoning parser expects it to begin with reasoning."""
    tools: bool = False
    """Tools were offered."""


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt that was accepted, and is about to wait for its turn."""

    request: GenerateRequest
    context: RequestContext
    stages: RequestStages
    answer_id: str
    """What the client knows its answer as."""
    kind: Kind | None
    """Of a chat, by which its answers are remembered; None: it is none."""


class PromptEar(Protocol):
    """What an observer keeps of one prompt."""

    def hear(self, output: RequestOutput, replica: str) -> None:
        """The next output has come, from the replica with this unique name. Before anything is taken out of it."""
        ...

    def end(self, failed: str) -> None:
        """No output follows. `failed`: empty after the last one; "aborted", or the name of the error. Called once."""
        ...


class PromptObserver(Protocol):
    """See the module's docstring."""

    def begin(self, prompt: SentPrompt) -> PromptEar | None:
        """A prompt has come; None: of this one nothing else is wanted."""
        ...
