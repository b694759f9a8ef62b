"""The control API: where a prompt's KV lies, the cache's figures, and clearing tiers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from app.errors import UnavailableError
from app.prompt_keys import PromptKeys
from app.replica_handle import ControlPlane
from app.request_context import current_request

logger = logging.getLogger(__name__)

PATHS = frozenset({"/api/v1/kv/lookup", "/api/v1/kv/stats", "/api/v1/kv/clear"})
TIMEOUT_S = 10.0
"""The manager answers in milliseconds; clearing asks every replica and tier."""

T = TypeVar("T")


class ClearRequest(BaseModel):
    """Body of POST /api/v1/kv/clear."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[Literal["device", "cpu", "redis"]] = Field(min_length=1)


def control_router(control: ControlPlane, renderer: OnlineRenderer, keys: PromptKeys) -> APIRouter:
    """The routes under /api/v1/kv."""
    router = APIRouter(prefix="/api/v1/kv")

    @router.get("/lookup")
    async def lookup(
        text: str | None = None,
        tokens: Annotated[str | None, Query(description="token ids, separated by commas")] = None,
        messages: Annotated[str | None, Query(description="a chat's messages, as JSON")] = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """Where the KV of a prompt of this tenant lies: give exactly one of `text`, `tokens` and `messages`."""
        if sum(given is not None for given in (text, tokens, messages)) != 1:
            raise VLLMValidationError("Give exactly one of `text`, `tokens` and `messages`.")
        validate_cache_salt(cache_salt)
        if tokens is not None:
            token_ids = _parse_tokens(tokens)
        elif messages is not None:
            token_ids = await _render_chat(renderer, messages)
        else:
            token_ids = await _render_text(renderer, text or "")
        hashes = keys.hashes(token_ids, keys.salt(current_request().tenant, cache_salt))
        found = await _ask(control.lookup(hashes))
        return {
            "tokens": len(token_ids), "block_size_tokens": keys.block_size, **in_tokens(found, keys.block_size),
        }  # fmt: skip

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        """The cache's figures, of all tenants together."""
        return await _ask(control.stats())

    @router.post("/clear")
    async def clear(request: ClearRequest) -> dict[str, Any]:
        """Forget all KV in these tiers, of all tenants; running requests are not disturbed."""
        return await _ask(control.clear(list(dict.fromkeys(request.tiers))))

    return router


def in_tokens(found: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """What the manager found, in blocks, with the same in tokens beside it.

    `tokens_by_tier`: leading tokens of the prompt that lie in a tier, on the device by replica; `start_token` and
    `end_token` (exclusive) of every segment.
    """
    return {
        **found,
        "tokens_by_tier": {
            "device": {replica: blocks * block_size for replica, blocks in found["device"].items()},
            **{tier: found[tier] * block_size for tier in ("cpu", "redis")},
        },
        "segments": [
            {
                **segment,
                "start_token": segment["start"] * block_size,
                "end_token": (segment["start"] + segment["num_blocks"]) * block_size,
            }
            for segment in found["segments"]
        ],
    }


async def _ask(answer: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await answer
    except Exception as error:
        logger.warning("the KV manager does not answer", exc_info=True)
        raise UnavailableError("The KV manager does not answer. Please try again later.") from error


def _parse_tokens(tokens: str) -> list[int]:
    parts = [part.strip() for part in tokens.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise VLLMValidationError("`tokens` must be token ids separated by commas, such as 1,17,2.", parameter="tokens")
    return [int(part) for part in parts]


async def _render_text(renderer: OnlineRenderer, text: str) -> list[int]:
    """The tokens that /v1/completions would make of `text`."""
    (prompt,) = await renderer.preprocess_completion(CompletionRequest(prompt=text, max_tokens=1), text, None)
    return list(prompt["prompt_token_ids"])  # type: ignore[typeddict-item]


async def _render_chat(renderer: OnlineRenderer, messages: str) -> list[int]:
    """The tokens that /v1/chat/completions would make of `messages`."""
    try:
        request = ChatCompletionRequest.model_validate({"messages": json.loads(messages), "max_tokens": 1})
    except json.JSONDecodeError as error:
        raise VLLMValidationError(f"`messages` is not JSON: {error}.", parameter="messages") from None
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    rendered = await renderer.render_chat(request)
    if isinstance(rendered, ErrorResponse):
        raise VLLMValidationError(rendered.error.message, parameter="messages")
    _, (prompt,) = rendered
    return list(prompt["prompt_token_ids"])  # type: ignore[typeddict-item]
