"""A replica's plans of blended prompts, where its engine blends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from deployments.protocol.engine_hints import extra
from deployments.protocol.extensions.blend_request import BlendRequest
from deployments.protocol.wire import GenerateRequest, KVCacheUsage
from deployments.replica.plan_extension import EngineTerms, PlannedExtra
from kvmanager.extensions.blend.blend_choice import BlendSpan, blend_of
from kvmanager.extensions.blend.chunks import BLEND, BlendQuery, BlendTerms, ChunkQuery, PlannedBlend
from kvmanager.moves.plan import Plan

if TYPE_CHECKING:
    from kvmanager.segments.keys import BlockHash


def blend_query(request: GenerateRequest, terms: BlendTerms, block_tokens: int) -> BlendQuery | None:
    """What to ask of a prompt's chunks; None where nothing can be blended.

    Chunks without a full block are left out, and those that are not what they say: so there are at most as many hashes
    as the prompt has blocks, however many chunks a client makes of it. O(chunks).
    """
    wanted: BlendRequest | None = request.extras.get(BLEND)
    if wanted is None or not 0.0 <= wanted.recompute_ratio <= 1.0:
        return None
    chunks, end = [], 0
    for chunk in wanted.chunks:
        stop = chunk.start_token + chunk.tokens
        fits = end <= chunk.start_token < stop <= len(request.prompt_token_ids)
        if fits and 0 < len(chunk.block_hashes) <= chunk.tokens // block_tokens:
            hashes = cast("Sequence[BlockHash]", chunk.block_hashes)
            chunks.append(ChunkQuery(chunk.start_token, chunk.tokens, hashes))
            end = stop
    return BlendQuery(chunks, wanted.recompute_ratio, terms) if chunks else None


class _Blend(PlannedExtra):
    """A planned blend; its span is known once it is known where it starts."""

    def __init__(self, planned: PlannedBlend, prompt_tokens: int, engine: EngineTerms) -> None:
        self._planned = planned
        self._prompt_tokens = prompt_tokens
        self._engine = engine
        self._span: BlendSpan | None = None

    def saved_tokens(self, start: int) -> int:
        """Return the tokens that the blend spares: a part of its tokens is computed."""
        planned, block_tokens = self._planned, self._engine.block_tokens
        stored = [(chunk.start_token, chunk.blocks * block_tokens) for chunk in planned.chunks]
        rest = range(start, self._prompt_tokens)
        self._span = span = blend_of(stored, rest, block_tokens, planned.ratio, self._engine.terms)
        return int((span.end - start) * (1.0 - span.share))

    def reused(self, usage: KVCacheUsage) -> int:
        """Return the blended tokens."""
        return usage.get("blended", 0)

    def failed(self, usage: KVCacheUsage) -> bool:
        """Return whether nothing was blended, although the device did not have it by then.

        A blend that recomputes all of its tokens reuses none.
        """
        span = self._span
        if span is None or "blended" in usage or span.ratio >= 1.0:
            return False
        return usage["device"] < span.end


class BlendedPrompts:
    """See the module's docstring. The engine's terms are `BlendTerms`."""

    def ask(self, request: GenerateRequest, engine: EngineTerms) -> BlendQuery | None:
        """See `blend_query`."""
        return blend_query(request, engine.terms, engine.block_tokens)

    def planned(self, request: GenerateRequest, plan: Plan, engine: EngineTerms) -> PlannedExtra | None:
        """Return what a plan blends."""
        planned = extra(plan, BLEND, PlannedBlend)
        return None if planned is None else _Blend(planned, request.num_tokens, engine)


def build() -> BlendedPrompts:
    """Make it."""
    return BlendedPrompts()
