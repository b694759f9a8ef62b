"""GET /api/v1/kv/trie: the index as a tree, the hottest part of it.

The manager does bounded work for each call (`kvmanager.views.tree`), and calls take turns (`query_limiter`).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from app.backend.manager_control import ManagerControl
from app.control.api import ask, owner_only
from app.control.moves import PREFIX, UNKNOWN, RefusedError
from app.control.query_limiter import QueryLimiter
from app.gate.json_route import JsonRoute
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys
from kvmanager.views.tree import MOST_DEPTH, MOST_NODES

PATHS = frozenset({f"{PREFIX}/trie"})


def trie_router(control: ManagerControl, keys: PromptKeys) -> APIRouter:
    """The route."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])
    limiter = QueryLimiter()

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
        caller = current_request().caller
        whose = None if caller.admin else keys.tag(caller.tenant)
        key = None if root is None else bytes.fromhex(root)
        async with limiter.turn(caller.tenant):
            found = await ask(control.trie(whose, key, depth, most))
        if found is None:
            raise RefusedError("There is no such node (any more).", HTTPStatus.NOT_FOUND)
        return {"object": "crosskv.trie", "root": None if root is None else root.lower(), **found}

    return router
