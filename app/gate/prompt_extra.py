"""The interface by which an extension takes part in requests of an ingress.

It may name the variants of a fidelity, and says what a prompt brings for it to a replica
(`deployments.protocol.wire.GenerateRequest.extras`). On the ingress's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from app.gate.kv_cache_field import KVCacheField
from app.gate.observed_prompt import PromptObserver
from kvmanager.segments.keys import Fidelity

if TYPE_CHECKING:
    from fastapi import APIRouter
    from vllm.renderers import BaseRenderer

    from app.gate.request_context import RequestContext
    from app.metrics.ingress import IngressMetrics
    from deployments.protocol.wire import GenerateRequest

Variant: TypeAlias = Callable[[KVCacheField], str]
"""Of a prompt whose request says that: what tells its KV from others' of the same fidelity
(`kvmanager.segments.keys.cache_salt`)."""


class PromptSpan(Protocol):
    """A run of a prompt's tokens that is stored as an exact prompt of these tokens alone."""

    @property
    def start(self) -> int:
        """Index of its first token."""
        ...

    @property
    def end(self) -> int:
        """Index of the first token behind it."""
        ...

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        ...


class PromptExtra(Protocol):
    """What prompts bring for one extension; one per ingress."""

    async def of(self, request: GenerateRequest, user_salt: str | None, context: RequestContext) -> Any:
        """Return what a tokenized prompt brings to its replica; None: nothing."""
        ...

    def spans(self, token_ids: Sequence[int], fidelity: Fidelity) -> Sequence[PromptSpan] | None:
        """Return what is stored apart of a prompt of which no more is known; None: prompts of this fidelity lack it."""
        ...


class FrontParts(NamedTuple):
    """What an extension may need of an ingress."""

    keys: Any
    """Its `app.openai.prompt_keys.PromptKeys`."""
    renderer: BaseRenderer
    chat_template: str | None
    metrics: IngressMetrics


class SendParts(NamedTuple):
    """What an extension may send prompts of its own with."""

    keys: Any
    """As in `FrontParts`."""
    sender: Any
    """The ingress's `app.openai.retries.PromptSender`."""
    control: Any
    """Its `app.backend.manager_control.ManagerControl`."""


class RouteParts(NamedTuple):
    """What routes of an extension may need."""

    keys: Any
    """As in `FrontParts`."""
    renderer: Any
    """Of prompts: vLLM's `OnlineRenderer`."""
    jobs: Any
    """The ingress's `app.control.jobs.Jobs`."""


class Preparation(PromptObserver, Protocol):
    """What an extension computes before prompts and after them; one per ingress."""

    async def before(self, request: GenerateRequest, tenant: str) -> None:
        """Prepare a prompt whose turn has come, before it is sent; the caller keeps the deadline.

        Raises what the prompt is then answered with.
        """
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class IngressExtension(Protocol):
    """An extension as an ingress starts it."""

    variants: Mapping[Fidelity, Variant]
    """By fidelity; requests of a fidelity that has variants are served by this extension alone."""
    paths: frozenset[str]
    """Of its routes."""

    def preparation(self, parts: SendParts) -> Preparation | None:
        """Make what works before prompts and after them; None: nothing does."""
        ...

    def router(self, extra: Any, preparation: Any, parts: RouteParts) -> APIRouter | None:
        """Make the routes, if there are any; `extra` and `preparation` are what these methods made."""
        ...

    def extra(self, parts: FrontParts) -> PromptExtra:
        """Make what reads its prompts. Raises SettingsError."""
        ...
