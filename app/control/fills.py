"""POST /api/v1/kv/fill: chunks of blended prompts are computed alone, when there is nothing else to do, and stored.

An order is a job. Its chunks go to the replicas one after another, each as an exact request of its own, which waits
there until no prompt is under way (`deployments.replica.idle_fills`). So no prompt waits for a fill, however many are
ordered. Each tenant has one order at a time, of bounded size, and its tokens count in the tenant's rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams

from app.backend.replica_errors import translate
from app.control.api import owner_only
from app.control.audit import audited_work
from app.control.fill_chunks import FillBody, chunks_of
from app.control.jobs import Jobs
from app.control.moves import ACCEPTED, PREFIX, RefusedError, accepted
from app.gate.auth import require_admin
from app.gate.errors import OverloadedError, PoisonPromptError, RefusedPromptError
from app.gate.json_route import JsonRoute
from app.gate.rates.limits import Spend
from app.gate.request_bounds import RequestBounds
from app.gate.request_context import current_request
from app.openai.engine_client import HandleEngineClient
from app.openai.retries import Attempts
from configs.settings import Settings
from deployments.protocol.wire import FILL_OUTCOME, GenerateRequest
from deployments.replica.chunk_fill import FILLED, NOT_BLENDED, NOT_STORED, STORED
from kvmanager.loading.load_choice import LoadMode

PATHS = frozenset({f"{PREFIX}/fill"})
OFF_S = 60.0
"""How long an order is refused after a replica has said that it does not blend."""

if TYPE_CHECKING:
    from app.extensions.blend.requests import BlendRequests

_NOT_BLENDED = "The replicas do not blend, and their logs say why. No prompt would read what is filled."

_REFUSED: dict[int | str, dict[str, Any]] = {
    HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse, "description": "There is no such tenant."},
    HTTPStatus.CONFLICT.value: {"model": ErrorResponse, "description": "Nothing is blended here, and why."},
}


@dataclass(slots=True)
class _Order:
    """What is to be filled. `salt` is that of the tenant's exact prompts, `tag` its name in the index."""

    chunks: list[list[int]]
    salt: str
    tag: str
    deadline_s: float
    spend: Spend | None
    progress: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress.update(chunks=len(self.chunks), tokens=sum(map(len, self.chunks)), done=0, filled=0, stored=0)


def why_off(settings: Settings) -> str | None:
    """Why these settings leave nothing to fill, in words; None: they do not."""
    kv = settings.kv
    if not kv.enabled:
        return "Blending is off: no KV is shared (kv.enabled)."
    if LoadMode(kv.load_or_recompute) is LoadMode.RECOMPUTE:
        return "Blending is off: stored KV is never used (kv.load_or_recompute)."
    if not kv.cpu_tier_bytes:
        return "Blending is off: there is no CPU tier to store chunks in (kv.cpu_tier_bytes)."
    return None


def fills_router(engine: HandleEngineClient, renderer: OnlineRenderer, jobs: Jobs, settings: Settings) -> APIRouter:
    """The route. `engine` has what a chunk's request is made of, and the way to the replicas."""
    router = APIRouter(prefix=PREFIX, route_class=JsonRoute, dependencies=[Depends(owner_only)])
    fills = Fills(engine)
    off = why_off(settings)

    @router.post("/fill", responses=_REFUSED, **ACCEPTED)
    async def fill(request: Request, body: FillBody) -> JSONResponse:
        """Compute the chunks of blended prompts alone, when there is nothing else to do, and store them.

        Give `chunks`, or a prompt: then its chunks are meant, those that it names in `kv_cache.chunks` or those that
        separators begin. Their tokens count in the caller's rate. Each tenant has one such job at a time; another one
        is answered 429. The job says how many chunks are `done`: `filled`, or `stored` before.
        """
        why = off or fills.why_off()
        if why is not None:
            raise RefusedError(why, HTTPStatus.CONFLICT)
        context = current_request()
        tenant = _tenant_of(body.tenant, settings.http.tenants)
        with fills.only_one_of(context.tenant) as keep:
            bounds: RequestBounds = request.app.state.request_bounds
            chunks = await chunks_of(body, renderer, cast("BlendRequests", engine.extras["blend"]), bounds)
            order = _Order(chunks, engine.keys.exact_salt(tenant, body.cache_salt), engine.keys.tag(tenant),
                           body.deadline_s, _reserved(chunks))  # fmt: skip
            try:
                work = audited_work(context.caller, "fill", lambda: fills.run(order, context.tenant), whose=order.tag)
                job = jobs.start("fill", context.tenant, work, order.progress)
            except BaseException:  # only this order can settle what it reserved
                if order.spend is not None:
                    order.spend.settle()
                raise
            keep()
        return accepted(job)

    return router


class Fills:
    """The orders under way; one per ingress, on its event loop."""

    def __init__(self, engine: HandleEngineClient) -> None:
        self._engine = engine
        self._ordering: set[str] = set()
        """Tenants that have an order under way."""
        self._off_until = float("-inf")

    def why_off(self) -> str | None:
        """Why an order would be in vain, as a replica said a while ago."""
        return _NOT_BLENDED if time.monotonic() < self._off_until else None

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

    async def run(self, order: _Order, tenant: str) -> dict[str, Any]:
        """Carry an order out, one chunk after another; for `Jobs`. Ends by its deadline."""
        lacking: Counter[str] = Counter()
        progress = order.progress
        left = order.chunks[::-1]
        try:
            async with asyncio.timeout(order.deadline_s):
                while left:
                    outcome = await self._fill(left[-1], order)
                    tokens = len(left.pop())
                    if outcome in (FILLED, STORED):
                        progress["done"] += 1
                        progress[outcome] += 1
                    else:
                        lacking[outcome] += 1
                    if order.spend is not None and outcome in (FILLED, NOT_STORED):
                        order.spend.use(tokens)
                    if outcome == NOT_BLENDED:
                        self._off_until = time.monotonic() + OFF_S
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

    async def _fill(self, chunk: list[int], order: _Order) -> str:
        """What became of one chunk (`deployments.replica.chunk_fill`); "refused": it may have ended an engine."""
        hashes = await asyncio.to_thread(self._engine.keys.hashes, chunk, order.salt)
        request = GenerateRequest(
            request_id=f"manual-{uuid.uuid4().hex}",
            prompt_token_ids=chunk,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            cache_salt=order.salt,
            block_hashes=hashes,
            tenant=order.tag,
            fills=True,
        )
        outcome = "failed"
        try:
            name_blocks = functools.partial(self._engine.keys.name_blocks, order.salt, None)
            attempts = Attempts(self._engine.sender, request, time.monotonic(), name_blocks)
            async with contextlib.aclosing(attempts.outputs()) as outputs:
                async for output in outputs:
                    outcome = str((output.kv_transfer_params or {}).get(FILL_OUTCOME, outcome))
        except (PoisonPromptError, RefusedPromptError):
            return "refused"
        return outcome


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
