"""POST /api/v1/kv/evict and POST /api/v1/kv/compress: what people order of one prompt's KV in its tiers."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import JSONResponse
from vllm.renderers.online_renderer import OnlineRenderer

from app.backend.manager_control import ManagerControl
from app.control.api import PREFIX, RefusedError, ask, owner_only, whose
from app.control.audit import audited, audited_work
from app.control.jobs import Jobs
from app.control.moves import (
    ACCEPTED,
    DRY_RUN,
    REFUSED,
    Rank,
    accepted,
    granted,
    hashes_of,
    would,
)
from app.control.prompt_param import PromptOrNode, PromptParam
from app.gate.json_route import JsonRoute
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys

PATHS = frozenset(f"{PREFIX}/{name}" for name in ("evict", "compress"))
POLL_S, LONGEST_POLL_S = 0.25, 4.0
"""Between two questions of a job how far the manager is; each pause is twice the one before, for a question carries all
hashes of the prompt."""


class EvictBody(PromptOrNode):
    """Body of POST /api/v1/kv/evict."""

    tiers: list[Literal["device", "cpu", "redis"]] = Field(
        min_length=1, description="Where from. A `node` names what is on no `device`."
    )
    replica: Rank | None = Field(None, description="With `device`: only on this replica's. Absent: on all.")
    deadline_s: float = Field(10.0, gt=0, le=60, description="Seconds that replicas have for it.")
    dry_run: bool = Field(False, description=DRY_RUN)


class CompressBody(PromptParam):
    """Body of POST /api/v1/kv/compress."""

    deadline_s: float = Field(60.0, gt=0, le=600, description="Seconds after which the job ends; the copying goes on.")


def orders_router(control: ManagerControl, renderer: OnlineRenderer, keys: PromptKeys, jobs: Jobs) -> APIRouter:
    """The routes, each for the prompts of the tenant who asks."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])

    @router.post("/evict", responses=REFUSED, **ACCEPTED)
    async def evict(body: EvictBody) -> JSONResponse:
        """Take what only this prompt needs out of tiers: its end, and all that follows on it.

        Segments that it shares with other known prompts stay. Pinned segments are refused. A segment that is being read
        leaves when that read has ended. A `node` includes the segments it follows on, unless others follow on them too.
        """
        node, caller = body.node_key(), current_request().caller
        if node is not None and "device" in body.tiers:
            raise RefusedError("A device's blocks cannot be named by a `node`: name a prompt.", HTTPStatus.BAD_REQUEST)
        hashes = [] if node is not None else await hashes_of(body, renderer, keys)
        tiers = list(dict.fromkeys(body.tiers))
        asked = hashes, node, whose(keys), tiers, body.replica, body.deadline_s
        if body.dry_run:
            return would(granted(await ask(control.evict(*asked, True))))

        async def work() -> dict[str, Any]:
            answer = await control.evict(*asked, False)
            return {"outcome": answer.pop("refused", "done"), **answer}

        said = {"node": body.node, "blocks": len(hashes), "tiers": tiers, "replica": body.replica}
        return accepted(jobs.start("evict", caller.tenant, audited_work(caller, "evict", work, **said)))

    @router.post("/compress", responses=REFUSED, **ACCEPTED)
    async def compress(body: CompressBody) -> JSONResponse:
        """Store a prompt's KV in Redis now, in the coding that the server stores with there.

        Meant is what the CPU tiers have of it; the copies there stay, and `evict` takes them. The job tells of the
        prompt's `segments` how many are `stored` and `waiting`, and of the stored ones `raw_bytes` and `coded_bytes`.
        """
        hashes, caller = await hashes_of(body, renderer, keys), current_request().caller
        said = {"blocks": len(hashes)}
        with jobs.place("compress", caller.tenant) as begin, audited(caller, "compress", **said) as line:
            answer = await ask(control.compress(hashes))
            line.came_of_it(answer)
            progress = granted(answer)

            async def work() -> dict[str, Any]:
                return await until_compressed(control, hashes, progress, body.deadline_s)

            job = begin(audited_work(caller, "compress", work, **said), progress)
            line.leave_to_job()
        return accepted(job)

    return router


async def until_compressed(
    control: ManagerControl, hashes: list[bytes], progress: dict[str, Any], deadline_s: float
) -> dict[str, Any]:
    """Follow the copying until nothing waits, for at most `deadline_s`; for `Jobs`."""
    pause_s = POLL_S
    try:
        async with asyncio.timeout(deadline_s):
            while progress["waiting"]:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_POLL_S)
                progress.update(await control.compressed(hashes))
    except TimeoutError:
        return {**progress, "outcome": "deadline", "message": "Some segments still wait; their copying goes on."}
    if progress["stored"] < progress["segments"]:
        message = "Redis has no room for the others that something colder has."
        return {**progress, "outcome": "refused_full", "message": message}
    return {**progress, "outcome": "done"}
