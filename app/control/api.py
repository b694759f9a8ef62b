"""The control API: where a prompt's KV lies, the index as a tree, the cache's figures, and clearing tiers.

A tenant sees and changes its own share; an administrator's key is about all tenants together (`app.gate.auth`). For the
tree the manager does bounded work at each call (`kvmanager.views.tree`), and calls take turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from app.backend.manager_control import ManagerControl
from app.control.audit import audited
from app.control.prompt_param import ChatFields, PromptParam
from app.gate.auth import require_owner
from app.gate.errors import OverloadedError, UnavailableError
from app.gate.json_route import JsonRoute
from app.gate.kv_cache_field import read_fidelity
from app.gate.prompt_extra import PromptExtra, PromptSpan
from app.gate.request_bounds import RequestBounds
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys
from kvmanager.views.tree import MOST_DEPTH, MOST_NODES

logger = logging.getLogger(__name__)

PREFIX = "/api/v1/kv"
PATHS = frozenset(f"{PREFIX}/{name}" for name in ("lookup", "stats", "clear", "trie"))
MOST_WAITING = 4
"""Queries that wait of one tenant, or of its administrators."""
PAUSE_S = 0.05
TIMEOUT_S = 10.0
"""The manager answers in milliseconds; clearing asks every replica and tier."""

UNKNOWN: dict[int | str, dict[str, Any]] = {
    HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse, "description": "Nothing is known of it."}
}

T = TypeVar("T")


class RefusedError(GracefulHTTPError):
    """The manager will not do it: an answer in OpenAI's shape, with its sentence."""


class QueryLimiter:
    """Holds apart what takes milliseconds of the manager: one query at a time, of all tenants, with a pause after each.

    Of each tenant only a few wait. So a client in a loop takes no more of the manager than one that asks now and then.
    On one event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and pause after it. Raises OverloadedError: too many of this tenant wait already."""
        if self._waiting[tenant] >= MOST_WAITING:
            raise OverloadedError("Questions of yours wait already. Please try again in a moment.")
        self._waiting[tenant] += 1
        try:
            async with self._lock:
                yield
                await asyncio.sleep(PAUSE_S)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]


class ClearRequest(BaseModel):
    """Body of POST /api/v1/kv/clear."""

    model_config = ConfigDict(extra="forbid")

    tiers: list[Literal["device", "cpu", "redis"]] = Field(min_length=1, description="The tiers to empty.")
    dry_run: bool = Field(False, description="Say what would go, and change nothing.")


def owner_only() -> None:
    """For routes about a tenant's own share. Raises ForbiddenError for strangers to a server without keys."""
    require_owner(current_request().caller)


def whose(keys: PromptKeys) -> str | None:
    """The tag of the tenant whose share the caller may see and change; None: all tenants', an administrator's."""
    caller = current_request().caller
    return None if caller.admin else keys.tag(caller.tenant)


def control_router(
    control: ManagerControl,
    renderer: OnlineRenderer,
    keys: PromptKeys,
    extras: Mapping[str, PromptExtra],
    has_states: bool = False,
) -> APIRouter:
    """The routes under /api/v1/kv. `extras`: what prompts bring for extensions, by their names. `has_states`: the
    model has layers with states, so that its prompts can be resumed at landings alone."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])
    clearing: set[str | None] = set()
    limiter = QueryLimiter()

    @router.get("/lookup")
    async def lookup(
        request: Request,
        text: Annotated[str | None, Query(description="The prompt as text.")] = None,
        tokens: Annotated[str | None, Query(description="The prompt's token ids, separated by commas.")] = None,
        messages: Annotated[str | None, Query(description="A chat's messages, as JSON.")] = None,
        chat: Annotated[
            str | None,
            Query(description="What else a chat's request says of its prompt, as JSON: `tools`, `documents` and more."),
        ] = None,
        truncate_prompt_tokens: Annotated[int | None, Query(ge=-1, description="As its requests send it.")] = None,
        model: Annotated[str | None, Query(description="What its requests send as `model`.")] = None,
        cache_salt: Annotated[str | None, Query(description="What its requests send as `cache_salt`.")] = None,
        fidelity: Annotated[
            str | None, Query(description="`exact`, `tolerant` or `blended`, as its requests say.")
        ] = None,
        recompute_ratio: Annotated[
            float | None, Query(ge=0, le=1, description="Of a blended prompt, as its requests say.")
        ] = None,
    ) -> dict[str, Any]:
        """Where the KV of a prompt of this tenant lies. Give exactly one of `text`, `tokens` and `messages`.

        `redis_with_sparse` counts sparse copies too, which only tolerant prompts may be given. Of a blended prompt
        `chunks` says how many leading tokens of each chunk that a separator begins lie where. A model with states can
        be resumed only at its segments' `landings`; `landing_token` is the last that could be loaded. Others, with
        windows too, can at each block's end.
        """
        bounds: RequestBounds = request.app.state.request_bounds
        given = {
            "text": text,
            "tokens": _parse_tokens(tokens, bounds.most_tokens),
            "messages": None if messages is None else _parse_messages(messages, bounds),
            **({} if chat is None else _parse_chat(chat, bounds)),
        }
        bounds.check(given, len(request.scope["query_string"]))
        prompt = PromptParam(
            **given,
            model=model,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
            kv_cache={"fidelity": read_fidelity(fidelity, "fidelity"), "recompute_ratio": recompute_ratio},
        )
        token_ids = await prompt.token_ids(renderer)
        most_blocks = (len(token_ids) - 1) // keys.block_size if has_states else None
        found = await ask(control.lookup(prompt.hashes_of(token_ids, keys), most_blocks))
        answer = {
            "tokens": len(token_ids), "block_size_tokens": keys.block_size, **in_tokens(found, keys.block_size),
        }  # fmt: skip
        salt = keys.exact_salt(current_request().tenant, cache_salt)
        for extra in extras.values() if keys.adapter(model) is None else ():
            chunks = extra.spans(token_ids, prompt.fidelity(keys))
            if chunks is not None:
                answer["chunks"] = await ask(_lookup_chunks(control, keys, token_ids, chunks, salt))
        return answer

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        """The cache's figures: the caller's own share, or all tenants' for an administrator.

        Of `segments` and `bytes`, `states` and `state_bytes` are a model's states.
        """
        caller = current_request().caller
        if caller.admin:
            return await ask(control.stats())
        return {"tenant": caller.tenant, **await ask(control.tenant_stats(keys.tag(caller.tenant)))}

    @router.post("/clear")
    async def clear(request: ClearRequest) -> dict[str, Any]:
        """Forget the caller's KV in these tiers, or all tenants' for an administrator.

        Running requests are not disturbed. Each tenant clears once at a time; a second clear is answered 429.
        `dry_run` answers `would`: by tier the segments and bytes, on devices the blocks, which are null for a tenant.
        """
        tenant = whose(keys)
        tiers = list(dict.fromkeys(request.tiers))
        if request.dry_run:
            return {"dry_run": True, "would": await ask(control.would_clear(tiers, tenant))}
        if tenant in clearing:
            raise OverloadedError("A clear is under way already. Please try again when it has ended.")
        clearing.add(tenant)
        try:
            with audited(current_request().caller, "clear", tiers=tiers) as line:
                cleared = await ask(control.clear(tiers, tenant))
                line.came_of_it(cleared)
                return cleared
        finally:
            clearing.discard(tenant)

    @router.get("/trie", responses=UNKNOWN)
    async def trie(
        root: Annotated[
            str | None,
            Query(pattern="^([0-9a-fA-F]{2}){1,64}$", description="A node's `id`; absent: all without a parent."),
        ] = None,
        depth: Annotated[int, Query(ge=1, le=MOST_DEPTH, description="Levels below `root`.")] = 3,
        most: Annotated[int, Query(ge=1, le=MOST_NODES, description="Nodes that are returned at most.")] = 300,
    ) -> dict[str, Any]:
        """The index as a tree: the hottest subtrees, of the caller's prompts or, for an administrator, of all.

        `nodes` are segments, parents before their children, and among siblings the hottest first. `tokens` and `bytes`
        are the segment's own, `bytes` in all shared tiers. `tiers` says which replicas' devices have it, and its bytes
        in the others; so do those of `landings`, where a model with states can be resumed. `uses` have decayed.
        `hotness` is the same between 0 and 1. `children` are those that it has, `hidden` those of them that are not
        returned; next to `nodes`, `hidden` counts roots. `tokens_below` and `segments_below` are of all that follows
        on it; unless `below_complete`, there is more.
        """
        key = None if root is None else bytes.fromhex(root)
        async with limiter.turn(current_request().tenant):
            found = await ask(control.trie(whose(keys), key, depth, most))
        if found is None:
            raise RefusedError("There is no such node (any more).", HTTPStatus.NOT_FOUND)
        return {"object": "crosskv.trie", "root": None if root is None else root.lower(), **found}

    return router


_HTTP_NAMES = {"redis_in_any_form": "redis_with_sparse", "has_other_form": "sparse"}
"""Of what the manager says of forms: there is one that is not dense."""


def in_tokens(found: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """Return what the manager found, in blocks, together with the same in tokens.

    `tokens_by_tier`: leading tokens of the prompt that lie in a tier, on the device by replica, in Redis dense ones and
    with sparse copies; `start_token` and `end_token` (exclusive) of every segment. Of a model with states `end_token`
    of each of its landings, and `landing_token`, the last one's.
    """
    found = {_HTTP_NAMES.get(name, name): value for name, value in found.items()}
    return {
        **found,
        **({"landing_token": found["landing"] * block_size} if "landing" in found else {}),
        "tokens_by_tier": {
            "device": {replica: blocks * block_size for replica, blocks in found["device"].items()},
            **{tier: found[tier] * block_size for tier in ("cpu", "redis", "redis_with_sparse") if tier in found},
        },
        "segments": [
            {
                **{_HTTP_NAMES.get(name, name): value for name, value in segment.items()},
                "start_token": segment["start"] * block_size,
                "end_token": segment["end"] * block_size,
                **_landings_in_tokens(segment, block_size),
            }
            for segment in found["segments"]
        ],
    }


def _landings_in_tokens(segment: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    if "landings" not in segment:
        return {}
    return {"landings": [{**one, "end_token": one["end"] * block_size} for one in segment["landings"]]}


async def _lookup_chunks(
    control: ManagerControl, keys: PromptKeys, token_ids: Sequence[int], chunks: Sequence[PromptSpan], salt: str
) -> list[dict[str, Any]]:
    """Where a prompt's chunks lie, as `in_tokens` has it; `salt` is that of the tenant's exact prompts.

    One after another: a prompt may have hundreds of them, and the manager has others to answer.
    """
    found = [await control.lookup(keys.hashes(token_ids[chunk.start : chunk.end], salt)) for chunk in chunks]
    return [
        {
            "start_token": chunk.start,
            "tokens": chunk.tokens,
            "tokens_by_tier": in_tokens(one, keys.block_size)["tokens_by_tier"],
        }
        for chunk, one in zip(chunks, found, strict=True)
    ]


async def ask(answer: Awaitable[T]) -> T:
    """What the manager answers. Raises UnavailableError when it does not, in `TIMEOUT_S`."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await answer
    except Exception as error:
        logger.warning("the KV manager does not answer", exc_info=True)
        raise UnavailableError("The KV manager does not answer. Please try again later.") from error


def _parse_tokens(tokens: str | None, most: int) -> list[int] | None:
    if tokens is None:
        return None
    if tokens.count(",") >= most:
        raise VLLMValidationError(f"`tokens` is longer than the model's context, {most} tokens.", parameter="tokens")
    parts = [part.strip() for part in tokens.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise VLLMValidationError("`tokens` must be token ids separated by commas, such as 1,17,2.", parameter="tokens")
    return [int(part) for part in parts]


def _parse_chat(chat: str, bounds: RequestBounds) -> dict[str, Any]:
    parsed = bounds.read_text(chat.encode("utf-8", "surrogatepass"), "chat")
    try:
        return ChatFields.model_validate(parsed).given()
    except ValidationError as error:
        names = ", ".join(f"`{name}`" for name in ChatFields.model_fields)
        raise VLLMValidationError(f"`chat` must be an object that may hold {names}.", parameter="chat") from error


def _parse_messages(messages: str, bounds: RequestBounds) -> list[Any]:
    parsed = bounds.read_text(messages.encode("utf-8", "surrogatepass"), "messages")
    if not isinstance(parsed, list):
        raise VLLMValidationError("`messages` must be a list of a chat's messages.", parameter="messages")
    return parsed
