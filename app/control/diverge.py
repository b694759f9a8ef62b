"""POST /api/v1/kv/diverge: where two prompts part, what that costs of the cache, and how often it happens.

A date, a request id or a billing line at a prompt's beginning makes all that follows another prompt. This shows it:
the first token that differs, the texts around it, and how many tokens of either the cache has now, against how many it
could share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from vllm.renderers.online_renderer import OnlineRenderer

from app.backend.manager_control import ManagerControl
from app.control.api import PREFIX, ask, in_tokens, owner_only
from app.control.prompt_param import PromptParam
from app.divergence.divergence import MOST_APART, SHOWN_BEFORE, common, divergence
from app.divergence.recent_prefixes import RecentPrefixes
from app.gate.json_route import JsonRoute
from app.gate.request_bounds import RequestBounds
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys

PATHS = frozenset({f"{PREFIX}/diverge"})
SHOWN_TOKENS = 24
"""Of either side of the place where prompts part."""


class DivergeBody(BaseModel):
    """Body of POST /api/v1/kv/diverge."""

    model_config = ConfigDict(extra="forbid")

    first: PromptParam = Field(description="A prompt, named as for the other routes.")
    second: PromptParam = Field(description="Another one.")


def diverge_router(
    control: ManagerControl, renderer: OnlineRenderer, keys: PromptKeys, prefixes: RecentPrefixes
) -> APIRouter:
    """The route, for prompts of the tenant who asks."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])

    @router.post("/diverge")
    async def diverge(request: Request, body: DivergeBody) -> dict[str, Any]:
        """Where two prompts of this tenant part: the first token that differs, and the texts around it.

        `shared_tokens` are before it, `reusable_tokens` those in full blocks; none where `cache_salt`, fidelity or a
        recompute ratio keep the prompts apart (`same_namespace`). `lost_tokens` are what might be reused, too, were it
        not for the difference; `cause` guesses what that is: `template`, `billing`, `date`, `id`, `other`, or null.
        `lately` counts the caller's prompts of a segment or more since this ingress started, and by cause those that
        lost their whole prefix.
        """
        bounds: RequestBounds = request.app.state.request_bounds
        prompts, tenant = (body.first, body.second), current_request().tenant
        for one in prompts:
            given = one.model_dump(exclude_none=True)
            bounds.check(given, len(str(given)))
        tokens = [await one.token_ids(renderer) for one in prompts]
        salts = [one.salt(keys) for one in prompts]
        first, second = (array("i", ids) for ids in tokens)
        shared, together = common(first.tobytes(), second.tobytes()), salts[0] == salts[1]
        reusable = shared - shared % keys.block_size if together else 0
        tokenizer, vocabulary = renderer.renderer.get_tokenizer(), renderer.model_config.get_vocab_size()

        def shown(token_ids: Sequence[int]) -> str:
            known = [token for token in token_ids if token < vocabulary]  # a client may name any
            return str(tokenizer.decode(known, skip_special_tokens=False))

        sides = []
        for token_ids, one in zip(tokens, prompts, strict=True):
            found = await ask(control.lookup(one.hashes_of(token_ids, keys)))
            sides.append(
                {
                    "tokens": len(token_ids),
                    "text": shown(token_ids[shared : shared + SHOWN_TOKENS]),
                    "tokens_by_tier": in_tokens(found, keys.block_size)["tokens_by_tier"],
                }
            )
        least = min(map(len, tokens))
        return {
            "same": shared == len(tokens[0]) == len(tokens[1]),
            "same_namespace": together,
            "shared_tokens": shared,
            "block": shared // keys.block_size,
            "block_size_tokens": keys.block_size,
            "shared_text": shown(tokens[0][max(0, shared - SHOWN_TOKENS) : shared]),
            "reusable_tokens": reusable,
            "lost_tokens": least - least % keys.block_size - reusable,
            "first": sides[0],
            "second": sides[1],
            "cause": cause_between(prefixes, first, second, shared, keys.block_size) if together else None,
            "lately": prefixes.of(tenant),
        }

    return router


def cause_between(
    prefixes: RecentPrefixes, first: array[int], second: array[int], shared: int, block_size: int
) -> str | None:
    """What keeps two prompts apart behind `shared` tokens; None: no block's worth of tokens is the same behind that."""
    since = max(0, shared - SHOWN_BEFORE)
    until = shared + 2 * MOST_APART + block_size
    one, other = first[since:until], second[since:until]
    where = divergence(one.tobytes(), other.tobytes(), block_size)
    return None if where is None else prefixes.cause(one, other, where)
