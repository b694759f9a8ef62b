"""What the ingress asks of the rest (`app.replica_handle`), over a Serve handle and the KV-manager actor."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.errors import UnavailableError
from app.manager_metrics import manager_metrics_text
from app.replica_errors import replica_gone
from app.replica_handle import Backend, HealthReport
from configs.settings import Settings
from deployments.failed_replicas import FailedReplicas
from deployments.manager_client import ManagerClient, ManagerUnavailableError
from deployments.order_taker import ORDERS_WAIT_S
from deployments.replica import PinnedCall
from deployments.router_metrics import router_metrics_text
from deployments.wire import GenerateRequest, Progress

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from vllm.outputs import RequestOutput

PARTS_EVERY_S = 1.0
SILENT_S = 3 * ORDERS_WAIT_S
"""A replica reports at least every `ORDERS_WAIT_S`. After so long /health calls it missing; it is still sent requests,
for Serve knows better whether it lives."""
PARTS_ANSWER_S = 2.0
INTRODUCTION_S = 10.0
"""Replicas that run introduce themselves to a new manager within their next poll."""
CLEAR_S = 8.0
REROUTE_S = 5.0
"""How long a prompt whose replica is gone may look for another one; without any, Serve would wait for a new one."""


class ServeReplicas:
    """The replicas behind their router. One per ingress, on its event loop."""

    def __init__(self, handle: DeploymentHandle, parts: PartsWatch) -> None:
        self._handle = handle.options(stream=True)
        self._parts = parts
        self._live: dict[str, Any] = {}
        self._failed = FailedReplicas()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Send one prompt; see `app.replica_handle.ReplicaHandle`."""
        progress = request.progress
        progress.failed = self._failed
        outputs: Any = outside_http_request(self._handle.generate.remote, request)
        self._live[request.request_id] = outputs
        try:
            if request.avoid:
                output = await _first_output(outputs, progress)
                if output is None:
                    return
                progress.first_token = True
                yield output
            async for output in outputs:
                progress.first_token = True
                yield output
        except Exception as error:
            if progress.replica and replica_gone(error):
                self._failed.note(progress.replica)
            raise
        finally:
            self._live.pop(request.request_id, None)
            outputs.cancel()

    async def abort(self, request_id: str) -> None:
        """Cancel the call; the replica's task is cancelled with it, which aborts the request in the engine."""
        outputs = self._live.pop(request_id, None)
        if outputs is not None:
            outputs.cancel()

    def ranks(self) -> Collection[int] | None:
        """As the manager last said; None when it does not answer."""
        return self._parts.ranks


class PartsWatch:
    """Asks the manager every second who is there, so that neither a request nor a health probe has to."""

    def __init__(self, manager: ManagerClient) -> None:
        self.ranks: Collection[int] | None = None
        self.silence_s: dict[int, float] = {}
        self.cpu_tiers: int | None = None
        self.redis: Mapping[str, Any] | None = None
        self.error = "not asked yet"
        self._some_at = float("-inf")
        self._manager = manager
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def hear(self, parts: Mapping[str, Any], now: float) -> None:
        """Take in what the manager said.

        A manager that knows no replica may have just started: for `INTRODUCTION_S` that says nothing about replicas.
        """
        self.silence_s = parts["replicas"]
        self.cpu_tiers, self.redis, self.error = len(parts["cpu_tiers"]), parts.get("redis"), ""
        self.ranks = frozenset(self.silence_s)
        if self.ranks:
            self._some_at = now
        elif now - self._some_at < INTRODUCTION_S:
            self.ranks, self.error = None, "it has just started, and the replicas are introducing themselves"

    async def _watch(self) -> None:
        while True:
            try:
                parts = await self._manager.ask("parts", timeout_s=PARTS_ANSWER_S)
                self.hear(parts, time.monotonic())
            except ManagerUnavailableError as error:
                self.ranks, self.cpu_tiers, self.redis, self.error = None, None, None, str(error)
            await asyncio.sleep(PARTS_EVERY_S)


class ManagerControl:
    """The control API's calls, to the manager actor."""

    def __init__(self, manager: ManagerClient) -> None:
        self._manager = manager

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """See `app.replica_handle.ControlPlane`."""
        found: dict[str, Any] = await self._manager.ask("lookup", hashes, timeout_s=PARTS_ANSWER_S)
        return found

    async def stats(self) -> dict[str, Any]:
        """See `app.replica_handle.ControlPlane`."""
        stats: dict[str, Any] = await self._manager.ask("stats", timeout_s=PARTS_ANSWER_S)
        return stats

    async def clear(self, tiers: Collection[str]) -> dict[str, Any]:
        """See `app.replica_handle.ControlPlane`."""
        cleared: dict[str, Any] = await self._manager.ask("clear", list(tiers), CLEAR_S, timeout_s=CLEAR_S + 1.0)
        return cleared

    async def pin(self, hashes: Sequence[bytes], ttl_s: float) -> dict[str, Any]:
        """See `app.replica_handle.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("pin", hashes, ttl_s, timeout_s=PARTS_ANSWER_S)
        return answer

    async def unpin(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        """See `app.replica_handle.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask("unpin", hashes, timeout_s=PARTS_ANSWER_S)
        return answer

    async def prefetch(self, hashes: Sequence[bytes], replica: int, deadline_s: float) -> dict[str, Any]:
        """See `app.replica_handle.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask(
            "prefetch", hashes, replica, deadline_s, timeout_s=deadline_s + PARTS_ANSWER_S
        )
        return answer

    async def move(self, hashes: Sequence[bytes], source: int, target: int, deadline_s: float) -> dict[str, Any]:
        """See `app.replica_handle.ControlPlane`."""
        answer: dict[str, Any] = await self._manager.ask(
            "move", hashes, source, target, deadline_s, timeout_s=deadline_s + PARTS_ANSWER_S
        )
        return answer


async def _first_output(outputs: AsyncIterator[RequestOutput], progress: Progress) -> RequestOutput | None:
    """The first output of a prompt that is sent again; None when there is none.

    Raises:
        UnavailableError: no replica has taken the prompt within `REROUTE_S`.
    """
    first = asyncio.ensure_future(anext(outputs, None))
    try:
        await asyncio.wait({first}, timeout=REROUTE_S)
        if not first.done() and not progress.replica:
            raise UnavailableError
        return await first
    finally:
        first.cancel()


def outside_http_request(call: Callable[..., Any], *args: Any) -> Any:
    """Make a handle call that has an identity of its own.

    Serve (ray 2.60.0) gives all calls that one HTTP request makes the request's internal id, and its router tells
    pending calls apart by that id: of two at once, one gets the other's replica, and one waits for ever. The id travels
    in a context variable, so the call is made in an empty context. `tests/app/test_serve_backend.py` holds it.
    """
    return contextvars.Context().run(call, *args)


def serve_backend(handle: DeploymentHandle, app_name: str, settings: Settings) -> Backend:
    """Everything behind the ingress. On the ingress's event loop."""
    manager = ManagerClient(app_name)
    parts = PartsWatch(manager)
    control = ManagerControl(manager)
    return Backend(
        replicas=ServeReplicas(handle, parts),
        control=control,
        health=health_probe(parts, settings),
        metrics=[
            _manager_text(control),
            _router_text,
            *(_replica_text(handle, rank) for rank in range(settings.replicas)),
        ],
    )


def health_probe(parts: PartsWatch, settings: Settings) -> Callable[[], Awaitable[HealthReport]]:
    """What GET /health asks; answers from what `parts` last heard, without asking anybody."""

    async def health() -> HealthReport:
        if parts.ranks is None:
            # Requests do not need the manager: only what it knows is missing here.
            return HealthReport(True, {"kv_manager": {"state": parts.error}})
        running = sorted(rank for rank, silence_s in parts.silence_s.items() if silence_s < SILENT_S)
        missing = settings.replicas - len(running)
        replicas = {"state": "ok" if missing <= 0 else f"{missing} of {settings.replicas} missing", "running": running}
        tier_wanted = settings.kv.enabled and settings.kv.cpu_tier_bytes > 0
        tier = {"state": "ok" if parts.cpu_tiers or not tier_wanted else "missing", "running": parts.cpu_tiers}
        report: dict[str, Mapping[str, Any]] = {
            "kv_manager": {"state": "ok"}, "replicas": replicas, "cpu_tier": tier,
        }  # fmt: skip
        if settings.kv.enabled and settings.kv.redis_url is not None and parts.redis is not None:
            report["redis"] = parts.redis
        return HealthReport(bool(running), report)

    return health


def _manager_text(control: ManagerControl) -> Callable[[], Awaitable[str]]:
    async def text() -> str:
        return manager_metrics_text(await control.stats())

    return text


async def _router_text() -> str:
    """The router works in the ingress's own process."""
    return router_metrics_text()


def _replica_text(handle: DeploymentHandle, rank: int) -> Callable[[], Awaitable[str]]:
    async def text() -> str:
        response = outside_http_request(handle.metrics.remote, PinnedCall(rank))
        try:
            return str(await response)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                response.cancel()
            raise

    return text
