"""What an order to compute chunks means: a body's chunks, or its prompt's, by their tokens.

The tokens are those that blended prompts will bring: found as the ingress finds a prompt's chunks
(`app.extensions.blend`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from app.control.prompt_param import PromptParam
from app.extensions.blend.requests import BlendRequests
from app.gate.kv_cache_field import MOST_CHUNKS, read_field
from app.gate.request_bounds import RequestBounds

MOST_TOKENS = 1 << 19
"""Of all chunks of an order: one row of token ids on their way is a few MB."""
MOST_CHARACTERS = 1 << 21
"""Of all texts of an order: tokenizing these takes a second or two of one core, on a thread."""

Chunk = str | list[Annotated[int, Field(strict=True)]]


class ChunksBody(PromptParam):
    """Body of POST /api/v1/kv/fill: a prompt, whose chunks are meant, or `chunks`."""

    chunks: list[Chunk] | None = Field(
        None,
        min_length=1,
        max_length=MOST_CHUNKS,
        description="In place of a prompt: up to 256 chunks, as texts or as lists of token ids. A text with separators "
        "in it holds the chunks that they begin. Any other is what requests name in `kv_cache.chunks`.",
    )
    tenant: str | None = Field(
        None, max_length=1024, description="For administrators: the tenant whose prompts bring these chunks."
    )
    deadline_s: float = Field(
        600.0, gt=0, le=86_400, description="Seconds after which what is not filled by then is given up."
    )


async def chunks_of(
    body: ChunksBody, renderer: OnlineRenderer, blends: BlendRequests, bounds: RequestBounds
) -> list[list[int]]:
    """The token ids of the chunks that are meant, each once. Raises VLLMValidationError (400), in words."""
    if body.chunks is None:
        found = await _chunks_of_prompt(body, renderer, blends)
    else:
        others = next((name for name in ("text", "tokens", "messages", "kv_cache", "truncate_prompt_tokens", "model")
                       if getattr(body, name) is not None), next(iter(body.given()), None))  # fmt: skip
        if others is not None:
            raise VLLMValidationError(f"`{others}` is of a prompt: give one, or `chunks`.", parameter=others)
        validate_cache_salt(body.cache_salt)
        found = await _chunks_as_given(body.chunks, blends, bounds)
    chunks = [list(chunk) for chunk in dict.fromkeys(map(tuple, found))]
    vocabulary = renderer.model_config.get_vocab_size()
    if any(not 0 <= token < vocabulary for chunk in chunks for token in chunk):
        raise VLLMValidationError(f"Token ids must be below {vocabulary}, the model's vocabulary.", parameter="chunks")
    if any(len(chunk) >= bounds.most_tokens for chunk in chunks):
        raise VLLMValidationError(f"A chunk must be shorter than {bounds.most_tokens} tokens, the model's context.")
    if len(chunks) > MOST_CHUNKS or sum(map(len, chunks)) > MOST_TOKENS:
        raise VLLMValidationError(f"At most {MOST_CHUNKS} chunks and {MOST_TOKENS} tokens of them are filled at once.")
    return chunks


async def _chunks_of_prompt(body: ChunksBody, renderer: OnlineRenderer, blends: BlendRequests) -> list[list[int]]:
    token_ids = await body.token_ids(renderer)
    named = read_field(body.kv_cache).chunks

    def find() -> list[list[int]]:
        texts = None if named is None else blends.tokenized(named)
        return [token_ids[span.start : span.end] for span in blends.chunks(token_ids, texts)]

    chunks = await asyncio.to_thread(find)
    if not chunks:
        raise VLLMValidationError(f"The prompt has no chunk of at least {_least(blends)}.")
    return chunks


async def _chunks_as_given(given: Sequence[Chunk], blends: BlendRequests, bounds: RequestBounds) -> list[list[int]]:
    texts = [chunk for chunk in given if isinstance(chunk, str)]
    if sum(map(len, texts)) > MOST_CHARACTERS or any(len(text) > bounds.most_characters for text in texts):
        raise VLLMValidationError(
            f"A text of `chunks` must not be longer than {bounds.most_characters} characters, as the model's context, "
            f"and all together not longer than {MOST_CHARACTERS}.",
            parameter="chunks",
        )
    of_texts = iter(await asyncio.to_thread(blends.alone, texts) if texts else ())
    found: list[list[int]] = []
    for number, chunk in enumerate(given):
        as_given = [chunk] if not isinstance(chunk, str) and len(chunk) >= blends.min_tokens else []
        chunks = next(of_texts) if isinstance(chunk, str) else as_given
        if not chunks:
            raise VLLMValidationError(
                f"`chunks[{number}]` holds no chunk of at least {_least(blends)}; shorter ones are not stored.",
                parameter=f"chunks[{number}]",
            )
        found += chunks
    return found


def _least(blends: BlendRequests) -> str:
    return f"{blends.min_tokens} tokens"
