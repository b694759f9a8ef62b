"""Moves of live streams to another replica: as an administrator orders, or for want of KV
(`routing.rebalance_streams`).

GET /api/v1/requests and POST /api/v1/requests/{id}/move are for administrators: the list shows every tenant's requests,
though nothing of what they say.

Which streams leave a replica that is short of KV, and where to, is `kvmanager.scheduling.rebalancing`'s to say.
Replicas report their device pools to the manager with every poll for directives. The ingress, which alone knows which
streams can move, hears of it every second. A stream goes on at the target as after any move, or, where that is gone by
then, at a replica of the router's choice. On the ingress's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError

from app.backend.protocols import ReplicaHandle
from app.continuation.live import LiveRequest, LiveRequests
from app.gate.auth import require_admin
from app.gate.json_route import JsonRoute
from app.gate.request_context import current_request
from app.metrics.labels import MOVED, REBALANCED
from kvmanager.routing.roles import Phase
from kvmanager.scheduling.rebalancing import KVReport, LiveStream, Rebalancing

logger = logging.getLogger(__name__)

PREFIX = "/api/v1/requests"
PATHS = frozenset({PREFIX})
EVERY_S = 1.0
"""Between two looks for streams that are to leave."""

ACCEPTED: Any = {"status_code": HTTPStatus.ACCEPTED, "response_model": dict[str, Any]}
_REFUSED: dict[int | str, dict[str, Any]] = {
    HTTPStatus.NOT_FOUND.value: {
        "model": ErrorResponse,
        "description": "No live request has this id, or no replica this number.",
    },
    HTTPStatus.CONFLICT.value: {"model": ErrorResponse, "description": "It cannot be moved; the sentence says why."},
}


class MoveStreamBody(BaseModel):
    """Body of POST /api/v1/requests/{request_id}/move."""

    model_config = ConfigDict(extra="forbid")

    replica: Annotated[int, Field(ge=0, lt=100_000, strict=True)] | None = Field(
        None, description="The number of the replica where it goes on. Empty: the router chooses."
    )


class NotMovedError(GracefulHTTPError):
    """An answer in OpenAI's shape, with a sentence."""


def requests_router(
    live: LiveRequests,
    replicas: ReplicaHandle,
    audited: Callable[..., AbstractContextManager[Any]] = lambda *said, **more: nullcontext(),
) -> APIRouter:
    """The routes under /api/v1/requests. `audited`: what writes a line of the audit log (`app.control.audit`)."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute)

    @router.get("")
    async def requests() -> dict[str, Any]:
        """The prompts that are being answered now, the oldest first. For administrators.

        `replica` is the number of the one that works on it. `tokens` have been answered. `resumed` says how often it
        went on at another replica. `not_movable` says why it cannot be moved; null: it can.
        """
        require_admin(current_request().caller)
        return {"requests": [one.report(replicas.rank_of) for one in live.all()]}

    @router.post("/{request_id}/move", **ACCEPTED, responses=_REFUSED)
    async def move(request_id: str, body: MoveStreamBody | None = None) -> JSONResponse:
        """Stop a stream at its replica, and go on with it at another one. For administrators.

        `request_id` is the list's `id`, or the id that the client sees in its answer. The client sees a pause. The body
        may be left out. A replica that cannot be sent to any more when the stream has stopped is replaced by another.
        """
        require_admin(current_request().caller)
        found = live.find(request_id)
        if not found:
            raise NotMovedError("No live request has this id.", HTTPStatus.NOT_FOUND)
        if len(found) > 1:
            raise NotMovedError(f"{len(found)} live requests have this id; name one by its `id`.", HTTPStatus.CONFLICT)
        (one,) = found
        attempts = one.attempts
        why = attempts.answered.why_not_moved()
        if why is None and not attempts.replica:
            why = "no replica works on it yet"
        if why is None and replicas.only_one():
            why = "there is no other replica"
        if why is not None:
            raise NotMovedError(f"The request cannot be moved: {why}.", HTTPStatus.CONFLICT)
        wanted = body.replica if body is not None else None
        target = "" if wanted is None else _target(replicas, one, wanted)
        source = replicas.rank_of(attempts.replica)
        with audited(current_request().caller, "move_request", id=one.request_id, source=source, target=wanted):
            attempts.leave(MOVED, target)
        answer = {"id": one.request_id, "source": source, "target": wanted, "tokens": attempts.answered.num_tokens}
        return JSONResponse(answer, status_code=HTTPStatus.ACCEPTED)

    return router


def _target(replicas: ReplicaHandle, one: LiveRequest, rank: int) -> str:
    """Return the unique name of the replica of this rank. Raises NotMovedError where the stream cannot go on there."""
    name = replicas.named(rank)
    if name is None:
        raise NotMovedError(f"There is no replica {rank}.", HTTPStatus.NOT_FOUND)
    if name == one.attempts.replica:
        why: str | None = "the stream is there already"
    else:
        why = replicas.why_not_to(name, one.attempts.phase)
    if why is not None:
        raise NotMovedError(f"The request cannot be moved to replica {rank}: {why}.", HTTPStatus.CONFLICT)
    return name


class StreamRebalancing:
    """Moves streams away from replicas that are short of KV, as an administrator could; of one ingress."""

    def __init__(self, live: LiveRequests, replicas: ReplicaHandle, block_tokens: int) -> None:
        self._live = live
        self._replicas = replicas
        self._policy = Rebalancing(block_tokens)
        self._failed = False

    async def run(self) -> None:
        """Look again and again, for ever. What fails is logged once: streams stay where they are."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.look(time.monotonic())
            except Exception:
                if not self._failed:
                    logger.exception("streams cannot be moved from replicas that are short of KV")
                self._failed = True

    def look(self, now: float) -> None:
        """Move the streams that the policy picks now. `now`: of `time.monotonic`."""
        reports = self._replicas.kv_reports()
        for move in self._policy.decide(now, reports, self._streams, self._may_go):
            stream, target = move.stream, move.target
            (one,) = self._live.find(stream.name)
            logger.info(
                "request %s moves from replica %s (%d of %d KV blocks held, %d wanted) to %s (%d of %d): %d tokens, "
                "about %d to come",
                stream.name, stream.replica, *_pool(reports[stream.replica]), reports[stream.replica].wanted,
                target, *_pool(reports[target]), stream.tokens, stream.to_come,
            )  # fmt: skip
            one.attempts.leave(REBALANCED, target)

    def _may_go(self, replica: str, phase: Phase) -> bool:
        return self._replicas.why_not_to(replica, phase) is None

    def _streams(self) -> Iterator[LiveStream]:
        return (_stream(one) for one in self._live.all() if one.attempts.replica)


def _pool(report: KVReport) -> tuple[int, int]:
    return report.held, report.blocks


def _stream(one: LiveRequest) -> LiveStream:
    attempts, answered = one.attempts, one.attempts.answered
    return LiveStream(
        name=one.request_id,
        replica=attempts.replica,
        prompt_tokens=one.prompt_tokens,
        answered=answered.num_tokens,
        to_come=answered.to_come,
        since=attempts.progress.routed,
        moves=attempts.resumed,
        phase=attempts.phase,
        movable=answered.why_not_moved() is None,
    )
