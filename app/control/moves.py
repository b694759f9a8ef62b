"""The control API's orders: pin and unpin a prompt's KV, bring it to a replica's device, move it between replicas."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers.online_renderer import OnlineRenderer

from app.backend.manager_control import ManagerControl
from app.control.api import PREFIX, UNKNOWN, QueryLimiter, RefusedError, ask, owner_only, whose
from app.control.audit import audited, audited_work
from app.control.jobs import Job, Jobs
from app.control.prompt_param import PromptOrNode, PromptParam
from app.gate.json_route import JsonRoute
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys

PATHS = frozenset(f"{PREFIX}/{name}" for name in ("pin", "unpin", "prefetch", "move"))

ACCEPTED: Any = {"status_code": HTTPStatus.ACCEPTED, "response_model": dict[str, Any]}
Rank = Annotated[int, Field(ge=0, lt=100_000, strict=True)]

DEADLINE = "Seconds after which a move that has not ended is given up."

DRY_RUN = "Say what would go, and change nothing: answered 200 with `would`, and no job."

# Why the manager refuses, and the status that says so.
REFUSALS = {
    "unknown_key": HTTPStatus.NOT_FOUND,
    "no_replica": HTTPStatus.NOT_FOUND,
    "pin_budget": HTTPStatus.CONFLICT,
    "pinned": HTTPStatus.CONFLICT,
    "not_named": HTTPStatus.CONFLICT,
    "no_redis": HTTPStatus.CONFLICT,
    "bad_value": HTTPStatus.BAD_REQUEST,
}


REFUSED = {
    **UNKNOWN,
    HTTPStatus.CONFLICT.value: {"model": ErrorResponse, "description": "The manager refuses, and says why."},
}


class PinBody(PromptOrNode):
    """Body of POST /api/v1/kv/pin."""

    ttl_s: float = Field(3600.0, gt=0, le=86_400, description="Seconds that the pin lasts.")


class PrefetchBody(PromptOrNode):
    """Body of POST /api/v1/kv/prefetch: bring the prompt's KV to this replica's device."""

    replica: Rank = Field(description="The number of the replica whose device gets it.")
    deadline_s: float = Field(10.0, gt=0, le=60, description=DEADLINE)


class MoveBody(PromptOrNode):
    """Body of POST /api/v1/kv/move: from one replica's device to another's."""

    source: Rank = Field(description="The number of the replica that has it.")
    target: Rank = Field(description="The number of the replica that gets it.")
    deadline_s: float = Field(10.0, gt=0, le=60, description=DEADLINE)
    dry_run: bool = Field(False, description=DRY_RUN)


def moves_router(control: ManagerControl, renderer: OnlineRenderer, keys: PromptKeys, jobs: Jobs) -> APIRouter:
    """The routes for orders, under /api/v1/kv, each for the prompts of the tenant who asks."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])

    limiter = QueryLimiter()

    def tag_of_caller() -> str:
        return keys.tag(current_request().tenant)

    async def blocks_of(body: PromptOrNode) -> list[bytes]:
        """The hashes of what is named. Raises RefusedError for a node that is not known, another's, or has no names."""
        node = body.node_key()
        if node is None:
            return await hashes_of(body, renderer, keys)
        async with limiter.turn(current_request().tenant):
            hashes: list[bytes] = granted(await ask(control.hashes_to(node, whose(keys))))["hashes"]
        return hashes

    @router.post("/pin", responses=REFUSED)
    async def pin(body: PinBody) -> dict[str, Any]:
        """Keep the KV of a prompt's known beginning in the shared tiers for `ttl_s` seconds."""
        node = body.node_key()
        hashes = [] if node is not None else await hashes_of(body, renderer, keys)
        with audited(current_request().caller, "pin", node=body.node, blocks=len(hashes), ttl_s=body.ttl_s) as line:
            if node is not None:
                answer = await ask(control.pin_node(node, body.ttl_s, whose(keys)))
            else:
                answer = await ask(control.pin(hashes, body.ttl_s, tag_of_caller()))
            line.came_of_it(answer)
            return granted(answer)

    @router.post("/unpin", responses=REFUSED)
    async def unpin(body: PromptOrNode) -> dict[str, Any]:
        """End what `pin` began. A prompt that is not pinned stays as it is."""
        node = body.node_key()
        hashes = [] if node is not None else await hashes_of(body, renderer, keys)
        with audited(current_request().caller, "unpin", node=body.node, blocks=len(hashes)) as line:
            if node is not None:
                answer = await ask(control.pin_node(node, None, whose(keys)))
            else:
                answer = await ask(control.unpin(hashes, tag_of_caller()))
            line.came_of_it(answer)
            return granted(answer)

    @router.post("/prefetch", responses=REFUSED, **ACCEPTED)
    async def prefetch(body: PrefetchBody) -> JSONResponse:
        """Bring the KV of a prompt's known beginning to a replica's device, ahead of its requests.

        A `node` means what it follows on as well; 409 where only Redis has a part of that.
        """
        hashes, caller = await blocks_of(body), current_request().caller

        async def work() -> dict[str, Any]:
            return await control.prefetch(hashes, body.replica, body.deadline_s)

        asked = {"node": body.node, "blocks": len(hashes), "replica": body.replica}
        return accepted(jobs.start("prefetch", caller.tenant, audited_work(caller, "prefetch", work, **asked)))

    @router.post("/move", responses=REFUSED, **ACCEPTED)
    async def move(body: MoveBody) -> JSONResponse:
        """Move the KV of a prompt's known beginning from one replica's device to another's.

        A `node` means what it follows on as well; 409 where only Redis has a part of that.
        """
        if body.source == body.target:
            raise RefusedError("`source` and `target` are the same replica.", HTTPStatus.BAD_REQUEST)
        hashes, caller = await blocks_of(body), current_request().caller
        if body.dry_run:
            return would(granted(await ask(control.would_move(hashes, body.source, body.target))))

        async def work() -> dict[str, Any]:
            return await control.move(hashes, body.source, body.target, body.deadline_s)

        asked = {"node": body.node, "blocks": len(hashes), "source": body.source, "target": body.target}
        return accepted(jobs.start("move", caller.tenant, audited_work(caller, "move", work, **asked)))

    @router.get("/jobs/{job_id}", responses=UNKNOWN)
    async def job(job_id: str) -> dict[str, Any]:
        """How far a job of this tenant is."""
        found = jobs.find(job_id, current_request().tenant)
        if found is None:
            raise RefusedError("There is no such job (any more).", HTTPStatus.NOT_FOUND)
        return found.report()

    return router


async def hashes_of(prompt: PromptParam, renderer: OnlineRenderer, keys: PromptKeys) -> list[bytes]:
    """The hashes of a prompt's full blocks. Raises RefusedError (400) where there are none."""
    hashes = await prompt.hashes(renderer, keys)
    if not hashes:
        message = f"The prompt has no full block of {keys.block_size} tokens, so no KV of it is kept."
        raise RefusedError(message, HTTPStatus.BAD_REQUEST)
    return hashes


def would(answer: dict[str, Any]) -> JSONResponse:
    """200, and what an order would do."""
    return JSONResponse({"dry_run": True, "would": answer})


def accepted(job: Job) -> JSONResponse:
    """202, and where the job is polled."""
    url = f"{PREFIX}/jobs/{job.job_id}"
    return JSONResponse({**job.report(), "url": url}, status_code=HTTPStatus.ACCEPTED, headers={"Location": url})


def granted(answer: dict[str, Any]) -> dict[str, Any]:
    """What the manager answered. Raises RefusedError, with the manager's sentence, when it refused."""
    refused = answer.get("refused")
    if refused is not None:
        raise RefusedError(answer["message"], REFUSALS.get(refused, HTTPStatus.CONFLICT))
    return answer
