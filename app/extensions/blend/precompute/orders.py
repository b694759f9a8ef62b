"""POST /api/v1/kv/fill: chunks of blended prompts are computed alone, when there is nothing else to do, and stored.

An order names a body's chunks, or its prompt's. Their tokens are those that blended prompts will bring: found as the
ingress finds a prompt's chunks (`app.extensions.blend`).

An order is a job. Its chunks are computed one after another, in idle time (`turns`). So no prompt waits for one,
however many are ordered. Each tenant has one order at a time, of bounded size, and its tokens count in the rate of that
tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import JSONResponse
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from app.backend.replica_errors import translate
from app.control.api import PREFIX, RefusedError, owner_only
from app.control.audit import audited_work
from app.control.jobs import Jobs
from app.control.moves import ACCEPTED, accepted
from app.control.prompt_param import PromptParam
from app.extensions.blend.precompute.chunks import MissingChunk
from app.extensions.blend.precompute.precompute import FILLED, NOT_BLENDED, NOT_STORED, STORED, Precompute, why_off
from app.extensions.blend.requests import BlendRequests
from app.gate.auth import require_admin
from app.gate.errors import OverloadedError
from app.gate.json_route import JsonRoute
from app.gate.kv_cache_field import MOST_CHUNKS, read_field
from app.gate.prompt_extra import RouteParts
from app.gate.rates.limits import Spend
from app.gate.request_bounds import RequestBounds
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys
from configs.settings import Settings

PATHS = frozenset({f"{PREFIX}/fill"})
_NOT_BLENDED = "The replicas do not blend, and their logs say why. No prompt would read what is filled."

_REFUSED: dict[int | str, dict[str, Any]] = {
    HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse, "description": "There is no such tenant."},
    HTTPStatus.CONFLICT.value: {"model": ErrorResponse, "description": "Nothing is blended here, and why."},
}

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


@dataclass(slots=True)
class _ChunkOrder:
    """What is to be computed. `salt` is that of the tenant's exact prompts, `tag` its name in the index."""

    chunks: list[list[int]]
    salt: str
    tag: str
    deadline_s: float
    spend: Spend | None
    progress: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress.update(chunks=len(self.chunks), tokens=sum(map(len, self.chunks)), done=0, filled=0, stored=0)


def precompute_router(
    precompute: Precompute, blends: BlendRequests, parts: RouteParts, settings: Settings
) -> APIRouter:
    """The route. `blends` finds a prompt's chunks."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])
    keys: PromptKeys = parts.keys
    renderer: OnlineRenderer = parts.renderer
    jobs: Jobs = parts.jobs
    orders = ChunkOrders(precompute, keys)
    off = why_off(settings)

    @router.post("/fill", responses=_REFUSED, **ACCEPTED)
    async def fill(request: Request, body: ChunksBody) -> JSONResponse:
        """Compute the chunks of blended prompts alone, when there is nothing else to do, and store them.

        Give `chunks`, or a prompt: then its chunks are meant, those that it names in `kv_cache.chunks` or those that
        separators begin. Their tokens count in the caller's rate. Each tenant has one such job at a time; another one
        is answered 429. The job says how many chunks are `done`: `filled`, or `stored` before.
        """
        why = off or (_NOT_BLENDED if precompute.is_off else None)
        if why is not None:
            raise RefusedError(why, HTTPStatus.CONFLICT)
        context = current_request()
        tenant = _tenant_of(body.tenant, settings.http.tenants)
        with orders.only_one_of(context.tenant) as keep:
            bounds: RequestBounds = request.app.state.request_bounds
            chunks = await _chunks_meant(body, renderer, blends, bounds)
            order = _ChunkOrder(
                chunks, keys.exact_salt(tenant, body.cache_salt), keys.tag(tenant), body.deadline_s, _reserved(chunks)
            )
            try:
                work = audited_work(context.caller, "fill", lambda: orders.run(order, context.tenant), whose=order.tag)
                job = jobs.start("fill", context.tenant, work, order.progress)
            except BaseException:  # only this order can settle what it reserved
                if order.spend is not None:
                    order.spend.settle()
                raise
            keep()
        return accepted(job)

    return router


class ChunkOrders:
    """The orders under way; one per ingress, on its event loop."""

    def __init__(self, precompute: Precompute, keys: PromptKeys) -> None:
        self._precompute = precompute
        self._keys = keys
        self._ordering: set[str] = set()
        """Tenants that have an order under way."""

    @contextlib.contextmanager
    def only_one_of(self, tenant: str) -> Iterator[Callable[[], None]]:
        """Hold the tenant's place for one order; call what it yields to let `run` free it. Raises OverloadedError."""
        if tenant in self._ordering:
            raise OverloadedError("Chunks are being filled for you already. Please try again when that has ended.")
        self._ordering.add(tenant)
        kept: list[bool] = []
        try:
            yield lambda: kept.append(True)
        finally:
            if not kept:
                self._ordering.discard(tenant)

    async def run(self, order: _ChunkOrder, tenant: str) -> dict[str, Any]:
        """Carry an order out, one chunk after another; for `Jobs`. Ends by its deadline."""
        lacking: Counter[str] = Counter()
        progress = order.progress
        left = order.chunks[::-1]
        try:
            async with asyncio.timeout(order.deadline_s):
                while left:
                    hashes = await asyncio.to_thread(self._keys.hashes, left[-1], order.salt)
                    chunk = MissingChunk(left[-1], hashes, order.salt, order.tag)
                    outcome = await self._precompute.order(chunk, tenant)
                    tokens = len(left.pop())
                    if outcome in (FILLED, STORED):
                        progress["done"] += 1
                        progress[outcome] += 1
                    else:
                        lacking[outcome] += 1
                    if order.spend is not None and outcome in (FILLED, NOT_STORED):
                        order.spend.use(tokens)
                    if outcome == NOT_BLENDED:
                        return {**progress, "outcome": NOT_BLENDED, "message": _NOT_BLENDED}
        except TimeoutError:
            if order.spend is not None:
                order.spend.use(len(left[-1]))  # it may be under way
            message = f"{len(left)} chunks were not filled in time: there was too little idle time for them."
            return {**progress, "outcome": "deadline", "message": message}
        except Exception as error:
            told = translate(error, "of a chunk to be filled")
            return {**progress, "outcome": "unavailable", "message": str(told)}
        finally:
            self._ordering.discard(tenant)
            if order.spend is not None:
                order.spend.settle()
        if not lacking:
            return {**progress, "outcome": "done"}
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(lacking.items()))
        return {**progress, "outcome": "incomplete", "message": f"Some chunks are not stored: {said}."}


def _tenant_of(named: str | None, tenants: Collection[str]) -> str:
    """Return the tenant that owns the chunks. Raises ForbiddenError or RefusedError."""
    caller = current_request().caller
    if named is None or named == caller.tenant:
        return caller.tenant
    require_admin(caller)
    if named not in tenants:
        raise RefusedError("There is no such tenant.", HTTPStatus.NOT_FOUND)
    return named


def _reserved(chunks: Sequence[Sequence[int]]) -> Spend | None:
    """Take the chunks' tokens out of the caller's rate; None: it has none. Raises OverloadedError, or a 400."""
    spend = current_request().spend
    if spend is None:
        return None
    spend.reserve(sum(map(len, chunks)), 0)
    return spend.hand_over()


async def _chunks_meant(
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
