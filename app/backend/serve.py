"""What the ingress asks of the rest (`app.backend.protocols`), over a Serve handle and the KV-manager actor."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric
from ray._private.worker import global_worker

from app.backend.manager_control import ManagerControl
from app.backend.parts_watch import SILENT_S, PartsWatch, health_probe
from app.backend.protocols import Backend
from app.backend.replica_call import CallTimes, ReplicaCall, is_cancelled, merged
from app.backend.replica_errors import replica_gone
from app.gate.errors import UnavailableError
from app.metrics.labels import UNREACHABLE
from app.metrics.manager import manager_families
from app.metrics.parts import MetricsSource
from configs.settings import Settings
from deployments.protocol.manager_client import ManagerClient
from deployments.protocol.wire import FailedReplicas, GenerateRequest, PinnedCall, Progress
from deployments.router.metrics import router_families
from deployments.router.running_replicas import DecodeView, RunningReplicas, decode_view, running_replicas
from kvmanager.routing.roles import Phase, fit_for
from kvmanager.scheduling.rebalancing import KVReport

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from vllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

HAND_OVER_SHARE = 0.9
"""Of a drain: what still streams then goes on elsewhere. No sooner, for with another model than its own it cannot."""


class ServeReplicas:
    """The replicas behind their router. One per ingress, on its event loop."""

    def __init__(
        self,
        handle: DeploymentHandle,
        parts: PartsWatch,
        running: RunningReplicas,
        drain_s: float = math.inf,
        decoders: DecodeView | None = None,
        times: CallTimes | None = None,
    ) -> None:
        """`drain_s`: how long Serve lets a replica that it stops go on with what it has."""
        self._decoders = decoders or DecodeView()
        self._times = times or CallTimes()
        self._hand_over_s = HAND_OVER_SHARE * drain_s
        self._handle = handle.options(stream=True)  # starts the router, which tells `running`
        self._parts = parts
        self._running = running
        self._live: dict[str, ReplicaCall] = {}
        self._failed = FailedReplicas()
        self._dead = FailedReplicas()
        """Of these, those that will not come back; one that could not be reached may be well."""
        self._silent: frozenset[str] = frozenset()
        """As of the last look at which any replica reported."""
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Send one prompt; see `app.backend.protocols.ReplicaHandle`."""
        progress = request.progress
        progress.failed = self._failed
        call = outside_http_request(self._handle.generate.remote, request)
        outputs = ReplicaCall(call, progress, self._running, self._times)
        self._live[request.request_id] = outputs
        try:
            if request.avoid or request.replica_pin is not None:
                output = await _first_output(outputs, progress, self._times.reroute_s)
                if output is None:
                    return
                progress.first_token = True
                yield output
            params = request.sampling_params
            is_delta = params is not None and params.output_kind.name == "DELTA"
            async with contextlib.aclosing(merged(outputs) if is_delta else _as_they_come(outputs)) as read:
                async for output in read:
                    progress.first_token = True
                    yield output
        except Exception as error:
            reason = replica_gone(error)
            if progress.replica and reason:
                self._failed.note(progress.replica)
                if reason != UNREACHABLE:
                    self._dead.note(progress.replica)
            raise
        finally:
            self._live.pop(request.request_id, None)
            outputs.cancel()

    async def abort(self, request_id: str) -> None:
        """Cancel the call; the replica's task is cancelled with it, which aborts the request in the engine."""
        outputs = self._live.pop(request_id, None)
        if outputs is not None:
            outputs.cancel()

    async def _look(self) -> None:
        """A replica whose machine is gone or out of reach ends no call; one that Serve stops is left by its streams."""
        loop, failed = asyncio.get_running_loop(), False
        while True:
            await asyncio.sleep(self._times.look_s)
            living, silent = self.living() or frozenset(), self.silent()
            for name in silent:
                self._failed.note(name)
            for outputs in list(self._live.values()):
                try:
                    outputs.look(loop.time())
                    outputs.look_for_silence(loop.time(), silent)
                    outputs.look_for_drain(loop.time(), living, self._hand_over_s)
                except Exception:  # of one call: the other calls are still to be looked at
                    if not failed:
                        logger.exception("a call cannot be looked after (logged once)")
                    failed = True

    def living(self) -> frozenset[str] | None:
        """Names of those that run and live, as Serve, Ray and the requests say; None before Serve has told."""
        names = self._running.names()
        return None if names is None else frozenset(name for name in names if name not in self._dead)

    def silent(self) -> frozenset[str]:
        """Names of those that run and no longer report to the manager while others do; none while all are silent.

        A manager that has just started hears of one replica after the other: one that was not silent before is not
        silent yet. A manager forgets a replica that is silent for long: it stays silent here until it reports.
        """
        living, silence_s = self.living() or frozenset(), self._parts.silence_s
        late = frozenset(name for name in living if silence_s.get(name, 0.0) >= SILENT_S)
        forgotten = (self._silent & living) - silence_s.keys()
        if not any(name in silence_s for name in living - late):
            return frozenset()
        self._silent = late | forgotten
        return self._silent

    def none_left(self) -> bool:
        """See `app.backend.protocols.ReplicaHandle`."""
        living = self.living()
        return living is not None and not living

    def only_one(self) -> bool:
        """See `app.backend.protocols.ReplicaHandle`."""
        living = self.living()
        return living is not None and len(living) < 2

    def rank_of(self, replica: str) -> int | None:
        """See `app.backend.protocols.ReplicaHandle`."""
        return self._parts.ranks.get(replica) if self._parts.ranks else None

    def named(self, rank: int) -> str | None:
        """See `app.backend.protocols.ReplicaHandle`."""
        living = self.living() or frozenset()
        names = [name for name, has in self._parts.ranks.items() if has == rank]
        return max(names, key=lambda name: name in living, default=None)  # a successor has its number at once

    def why_not_to(self, replica: str, phase: Phase) -> str | None:
        """See `app.backend.protocols.ReplicaHandle`."""
        living = self.living() or frozenset()
        if replica not in living:
            return "it is being stopped, or is gone"
        if replica not in fit_for(sorted(living), phase, self._parts.roles):
            return f"its role is {self._parts.roles[replica]}"
        return None

    def kv_reports(self) -> Mapping[str, KVReport]:
        """See `app.backend.protocols.ReplicaHandle`."""
        living, silence_s = self.living() or frozenset(), self._parts.silence_s
        return {
            name: report
            for name, report in self._parts.kv.items()
            if name in living and silence_s.get(name, math.inf) < SILENT_S
        }

    def lacking_tokens(self, request: GenerateRequest) -> int | None:
        """See `app.backend.protocols.ReplicaHandle`."""
        return self._decoders.lacking_tokens(request)

    def ranks(self) -> Collection[int] | None:
        """Ranks as the manager last said, of the replicas that live; None when too little is known."""
        living, ranks = self.living(), self._parts.ranks
        if living is None or not ranks:
            return None
        return frozenset(rank for name, rank in ranks.items() if name in living)


async def _as_they_come(outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    async for output in outputs:
        yield output


async def _first_output(
    outputs: AsyncIterator[RequestOutput], progress: Progress, reroute_s: float
) -> RequestOutput | None:
    """The first output of a prompt that is sent again, or to one replica only; None when there is none.

    Raises:
        UnavailableError: no replica has taken the prompt within `reroute_s`.
    """
    first = asyncio.ensure_future(anext(outputs, None))
    try:
        await asyncio.wait({first}, timeout=reroute_s)
        if not first.done() and not progress.replica:
            raise UnavailableError
        return await first
    finally:
        first.cancel()


def outside_http_request(call: Callable[..., Any], *args: Any) -> Any:
    """Make a handle call that has an identity of its own.

    Serve gives all calls that one HTTP request makes the request's internal id, and its router tells
    pending calls apart by that id: of two at once, one gets the other's replica, and one waits for ever. The id travels
    in a context variable, so the call is made in an empty context. `tests/app/backend/test_serve_backend.py` holds it.
    """
    return contextvars.Context().run(call, *args)


def is_ending() -> bool:
    """Whether Serve is stopping this process's replica of the ingress, and waits for its requests.

    Leans on Ray: Serve calls nothing of the application's before the last request has ended, so the actor is asked.
    """
    return any(actor._replica_impl._shutting_down for actor in global_worker.actors.values())


def serve_backend(handle: DeploymentHandle, app_name: str, settings: Settings) -> Backend:
    """Everything behind the ingress. On the ingress's event loop."""
    # A handle says what the process that built the application would do, and that one knows nothing of SERVE_OPTIONS.
    handle = handle.options(_by_reference=False)
    manager = ManagerClient(app_name)
    parts = PartsWatch(manager)
    control = ManagerControl(manager)
    running = running_replicas(app_name)
    replicas = ServeReplicas(handle, parts, running, settings.http.drain_s, decode_view(app_name))

    def metrics() -> list[MetricsSource]:
        names = sorted(replicas.living() or parts.ranks)
        return [_manager_metrics(control), _router_metrics, *(_replica_metrics(handle, name) for name in names)]

    return Backend(
        replicas=replicas,
        control=control,
        health=health_probe(parts, replicas.living, settings, lambda: running.listed),
        metrics=metrics,
        ending=is_ending,
        follow_replicas=running.listen,
    )


def _manager_metrics(control: ManagerControl) -> MetricsSource:
    async def families() -> list[Metric]:
        return manager_families(await control.stats())

    return families


async def _router_metrics() -> list[Metric]:
    """The router works in the ingress's own process."""
    return router_families()


def _replica_metrics(handle: DeploymentHandle, name: str) -> MetricsSource:
    async def families() -> list[Metric]:
        response = outside_http_request(handle.metrics.remote, PinnedCall(name))
        try:
            answer: list[Metric] = await response
        except asyncio.CancelledError:
            response.cancel()
            if not is_cancelled():
                raise UnavailableError from None  # the replica ends, and with it the call
            raise
        return answer

    return families
