"""The control API's orders: pin and unpin a prompt's KV, bring it to a replica's device, move it between replicas."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError
from vllm.renderers.online_renderer import OnlineRenderer

from app.backend.protocols import ControlPlane
from app.control.api import ask, owner_only
from app.control.jobs import Job, Jobs
from app.control.prompt_param import PromptChoice
from app.gate.json_route import JsonRoute
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys

PREFIX = "/api/v1/kv"
PATHS = frozenset(f"{PREFIX}/{name}" for name in ("pin", "unpin", "prefetch", "move"))

ACCEPTED: Any = {"status_code": HTTPStatus.ACCEPTED, "response_model": dict[str, Any]}
Rank = Annotated[int, Field(ge=0, lt=100_000, strict=True)]

DEADLINE = "Seconds after which a move that has not ended is given up."

# Why the manager refuses, and the status that says so.
REFUSALS = {
    "unknown_key": HTTPStatus.NOT_FOUND,
    "no_replica": HTTPStatus.NOT_FOUND,
    "pin_budget": HTTPStatus.CONFLICT,
    "bad_value": HTTPStatus.BAD_REQUEST,
}


UNKNOWN: dict[int | str, dict[str, Any]] = {
    HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse, "description": "Nothing is known of it."}
}
REFUSED = {
    **UNKNOWN,
    HTTPStatus.CONFLICT.value: {"model": ErrorResponse, "description": "The manager refuses, and says why."},
}


class RefusedError(GracefulHTTPError):
    """The manager will not do it: an answer in OpenAI's shape, with its sentence."""


class PinBody(PromptChoice):
    """Body of POST /api/v1/kv/pin."""

    ttl_s: float = Field(3600.0, gt=0, le=86_400, description="Seconds that the pin lasts.")


class PrefetchBody(PromptChoice):
    """Body of POST /api/v1/kv/prefetch: bring the prompt's KV to this replica's device."""

    replica: Rank = Field(description="The number of the replica whose device gets it.")
    deadline_s: float = Field(10.0, gt=0, le=60, description=DEADLINE)


class MoveBody(PromptChoice):
    """Body of POST /api/v1/kv/move: from one replica's device to another's."""

    source: Rank = Field(description="The number of the replica that has it.")
    target: Rank = Field(description="The number of the replica that gets it.")
    deadline_s: float = Field(10.0, gt=0, le=60, description=DEADLINE)


def moves_router(control: ControlPlane, renderer: OnlineRenderer, keys: PromptKeys, jobs: Jobs) -> APIRouter:
    """The routes for orders, under /api/v1/kv, each for the prompts of the tenant who asks."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])

    async def hashes_of(prompt: PromptChoice) -> list[bytes]:
        hashes = await prompt.hashes(renderer, keys)
        if not hashes:
            message = f"The prompt has no full block of {keys.block_size} tokens, so no KV of it is kept."
            raise RefusedError(message, HTTPStatus.BAD_REQUEST)
        return hashes

    def tag_of_caller() -> str:
        return keys.tag(current_request().tenant)

    @router.post("/pin", responses=REFUSED)
    async def pin(body: PinBody) -> dict[str, Any]:
        """Keep the KV of a prompt's known beginning in the shared tiers for `ttl_s` seconds."""
        return granted(await ask(control.pin(await hashes_of(body), body.ttl_s, tag_of_caller())))

    @router.post("/unpin", responses=REFUSED)
    async def unpin(body: PromptChoice) -> dict[str, Any]:
        """End what `pin` began. A prompt that is not pinned stays as it is."""
        return granted(await ask(control.unpin(await hashes_of(body), tag_of_caller())))

    @router.post("/prefetch", **ACCEPTED)
    async def prefetch(body: PrefetchBody) -> JSONResponse:
        """Bring the KV of a prompt's known beginning to a replica's device, ahead of its requests."""
        hashes = await hashes_of(body)
        return accepted(
            jobs.start(
                "prefetch", current_request().tenant, lambda: control.prefetch(hashes, body.replica, body.deadline_s)
            )
        )

    @router.post("/move", **ACCEPTED)
    async def move(body: MoveBody) -> JSONResponse:
        """Move the KV of a prompt's known beginning from one replica's device to another's."""
        if body.source == body.target:
            raise RefusedError("`source` and `target` are the same replica.", HTTPStatus.BAD_REQUEST)
        hashes = await hashes_of(body)
        return accepted(
            jobs.start(
                "move",
                current_request().tenant,
                lambda: control.move(hashes, body.source, body.target, body.deadline_s),
            )
        )

    @router.get("/jobs/{job_id}", responses=UNKNOWN)
    async def job(job_id: str) -> dict[str, Any]:
        """How far a job of this tenant is."""
        found = jobs.find(job_id, current_request().tenant)
        if found is None:
            raise RefusedError("There is no such job (any more).", HTTPStatus.NOT_FOUND)
        return found.report()

    return router


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
