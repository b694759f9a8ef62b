"""The interface by which an extension takes part in requests of an ingress.

It may name the variants of a fidelity, and says what a prompt brings for it to a replica
(`deployments.protocol.wire.GenerateRequest.extras`). On the ingress's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from app.gate.kv_cache_field import KVCacheField
from kvmanager.segments.keys import Fidelity

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer

    from app.gate.request_context import RequestContext
    from app.metrics.ingress import IngressMetrics
    from deployments.protocol.wire import GenerateRequest

Variant: TypeAlias = Callable[[str, KVCacheField], str]
"""Of a tenant's prompt whose request says that: what tells its KV from others' of the same fidelity
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


class IngressExtension(Protocol):
    """An extension as an ingress starts it."""

    variants: Mapping[Fidelity, Variant]
    """By fidelity; requests of a fidelity that has variants are served by this extension alone."""

    def extra(self, parts: FrontParts) -> PromptExtra:
        """Make what reads its prompts. Raises SettingsError."""
        ...
