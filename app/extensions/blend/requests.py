"""From a blended prompt to its chunks: what the request names, else what separators begin, and under which names.

A chunk's names are those of the exact prompt that consists of it alone, under the salt of the tenant's exact prompts:
so what is stored of it is exact KV, which that prompt finds too, and no other tenant's. How much of the reused chunks
is computed again the request says, else the deployment, else the model's calibration.

Leans on vLLM: a renderer's `tokenizer`, of Hugging Face's kind or with an `encode` of its own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from vllm.sampling_params import SamplingParams

from app.extensions.blend.recognition import GivenTexts, Separators, Span, chunks_of_text
from app.extensions.blend.separators import find_separators
from app.gate.kv_cache_field import MOST_CHUNKS, SAYS_NOTHING, KVCacheField
from app.gate.prompt_extra import FrontParts
from app.gate.request_context import RequestContext
from app.metrics.labels import CHUNK_GIVEN, CHUNK_NOT_FOUND, CHUNK_RECOGNIZED
from app.openai.prompt_keys import LONG_PROMPT_TOKENS, PromptKeys
from configs.blending import DEFAULT_RECOMPUTE_RATIO, BlendSettings, read_blend_profile
from configs.settings import Settings
from deployments.protocol.extensions.blend_request import BlendRequest, PromptChunk
from deployments.protocol.wire import GenerateRequest
from kvmanager.extensions.blend.chunks import BLEND, blend_variant
from kvmanager.segments.keys import BLENDED, Fidelity

MIN_CHUNK_TOKENS = 64
"""Shorter chunks are computed with the prompt, and not stored by themselves."""
Encode = Callable[[Sequence[str]], list[list[int]]]
"""The token ids of texts, each alone, without any that a tokenizer adds."""


@dataclass(frozen=True, slots=True)
class RatioRule:
    """How much of a blended prompt is recomputed: `blending.recompute_ratio`, and the model's calibration."""

    deployment: float | None = None
    calibrated: float | None = None
    """None: the model is not calibrated."""

    @classmethod
    def from_settings(cls, settings: Settings) -> RatioRule:
        """Return the rule of this server; reads the calibration next to the weights."""
        profile, blending = read_blend_profile(settings.model_source), settings.blending
        calibrated = profile.recompute_ratio if profile else None
        return cls(blending.recompute_ratio, calibrated)

    def of(self, asked: KVCacheField = SAYS_NOTHING) -> float:
        """The share that the request names, else the deployment's, the calibrated one, CacheBlend's."""
        named = (asked.recompute_ratio, self.deployment, self.calibrated)
        return next((ratio for ratio in named if ratio is not None), DEFAULT_RECOMPUTE_RATIO)

    def variant(self, asked: KVCacheField = SAYS_NOTHING) -> str:
        """What tells blends of this share from others: each sixteenth of it has names of its own."""
        return blend_variant(self.of(asked))


class BlendRequests:
    """Makes what blended prompts bring to a replica; one per ingress. Its coroutines belong on the event loop."""

    def __init__(
        self,
        separators: Separators,
        encode: Encode,
        keys: PromptKeys,
        count: Callable[[str, int], None],
        ratios: RatioRule | None = None,
    ) -> None:
        """`count` is told how many chunks came about in which way."""
        self._separators = separators
        self._encode = encode
        self._keys = keys
        self._count = count
        self._ratios = ratios or RatioRule()
        self.min_tokens = max(MIN_CHUNK_TOKENS, keys.block_size)
        """Of shorter chunks nothing is stored."""

    async def of(self, request: GenerateRequest, user_salt: str | None, context: RequestContext) -> BlendRequest | None:
        """See `PromptExtra`. Chunks are computed by the model alone, so a prompt of an adapter brings none.

        On a thread where that takes long, for other streams' sake: with a long prompt, or one that texts are looked for
        in, which may be made to all but match everywhere.
        """
        if request.fidelity != BLENDED or request.adapter is not None or not may_blend(request.sampling_params):
            return None
        texts, tokens = await self.texts(context), request.prompt_token_ids
        find = functools.partial(self.make, tokens, context.tenant, user_salt, context.kv_cache, texts)
        is_long = len(tokens) > LONG_PROMPT_TOKENS or texts is not None
        return await asyncio.to_thread(find) if is_long else find()

    async def texts(self, context: RequestContext) -> GivenTexts | None:
        """The texts that an HTTP request names, tokenized once for all its prompts; None where it names none."""
        given = context.kv_cache.chunks
        if given is None:
            return None
        tokenized: asyncio.Future[GivenTexts] | None = context.extras.get(BLEND)
        if tokenized is None:
            tokenized = asyncio.ensure_future(asyncio.to_thread(self.tokenized, given))
            context.extras[BLEND] = tokenized
        return await asyncio.shield(tokenized)  # one prompt's end ends it for no other

    def tokenized(self, texts: Sequence[str]) -> GivenTexts:
        """Texts as they are looked for. Any thread."""
        return GivenTexts(self._encode(texts), self.min_tokens)

    def chunks(self, token_ids: Sequence[int], texts: GivenTexts | None) -> list[Span]:
        """A blended prompt's chunks: of the texts that its request names, else those that separators begin."""
        if texts is None:
            return self._separators.chunks(token_ids, self.min_tokens, MOST_CHUNKS)
        return texts.find(token_ids, MOST_CHUNKS).chunks

    def spans(self, token_ids: Sequence[int], fidelity: Fidelity) -> list[Span] | None:
        """See `PromptExtra`: the chunks of a blended prompt that separators begin."""
        return self.chunks(token_ids, None) if fidelity == BLENDED else None

    def alone(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Of each text the token ids of the chunks that it is, or holds; none: they are too short. Any thread."""
        return [chunks_of_text(ids, self._separators, self.min_tokens) for ids in self._encode(texts)]

    def make(
        self, token_ids: list[int], tenant: str, user_salt: str | None, asked: KVCacheField, texts: GivenTexts | None
    ) -> BlendRequest | None:
        """Return what a blended prompt adds to its tokens; None for one without chunks. Counts them. Any thread."""
        if texts is None:
            spans = self.chunks(token_ids, None)
            self._count(CHUNK_RECOGNIZED, len(spans))
        else:
            spans, absent = texts.find(token_ids, MOST_CHUNKS)
            self._count(CHUNK_GIVEN, len(spans))
            self._count(CHUNK_NOT_FOUND, absent)
        if not spans:
            return None
        salt = self._keys.exact_salt(tenant, user_salt)
        chunks = [
            PromptChunk(span.start, span.tokens, self._keys.hashes(token_ids[span.start : span.end], salt))
            for span in spans
        ]
        return BlendRequest(chunks, salt, self._ratios.of(asked))


def may_blend(params: SamplingParams) -> bool:
    """Whether a prompt with these parameters may read stored KV: none whose own logprobs the client wants to see."""
    return not params.skip_reading_prefix_cache and params.prompt_logprobs is None


def blend_requests(settings: BlendSettings, parts: FrontParts, ratios: RatioRule | None = None) -> BlendRequests:
    """Those of this server. Raises SettingsError for separators that cannot occur in a prompt."""
    return BlendRequests(
        find_separators(settings.separators, parts.renderer, parts.chat_template),
        _encoder(parts.renderer.tokenizer),
        parts.keys,
        parts.metrics.count_chunks,
        ratios,
    )


def _encoder(tokenizer: Any) -> Encode:
    """What encodes texts on a thread: with a copy, since others use the tokenizer meanwhile."""

    @functools.cache
    def copy() -> tokenizers.Tokenizer:  # not before a request names chunks: it is as large as the tokenizer
        made = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        made.no_truncation()
        made.no_padding()
        return made

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
            return [list(one.ids) for one in copy().encode_batch(list(texts), add_special_tokens=False)]
        return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    return encode
