"""One call of a replica over gRPC, whose outputs are merged for a slow reader, and whose loss is told in Ray's words.

Each token comes as an object of its own. What piles up on the replica's side vLLM merges there. What piles up here,
while this process's loop is busy with others, is merged here (`merged`), so that it is rendered and sent as one event:
the more there is to do, the fewer events a token takes. Nothing is held back for it, and the first output goes alone.

gRPC says of a lost replica only that it is unavailable, that it cancelled the call, or, when its machine is gone,
nothing for minutes. Ray knows of every death, and whether it was meant. So the end of a call is first compared with
what Ray says of the replica: if that is dead, the caller gets Ray's error with the cause. If it lives, it was only
unreachable.

Leans on Ray: `DeploymentResponseGenerator._replica_result_future`; in one loop, a call that ends from the other side is
`ActorUnavailableError`, `grpc.aio.AioRpcError` or `asyncio.CancelledError`. `tests/app/openai/test_retry_over_serve.py`
holds it. Leans on vLLM: `RequestOutput.add`, as its own engine client does for a slow reader. It drops the prompt's
logprobs, which come with each answer's first output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpc import StatusCode  # type: ignore[import-untyped]
from grpc.aio import AioRpcError  # type: ignore[import-untyped]
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import RequestCancelledError

from deployments.protocol.wire import Progress
from deployments.router.running_replicas import RunningReplicas

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


_LOST = (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long what may still come of a call is waited for, in seconds."""

    told_within_s: float = 1.0
    """After a call has ended: by then Ray has told of a process's death, which takes it some milliseconds."""
    last_outputs_s: float = 1.0
    """After a death: by then what the replica has sent is read, and the call has ended by itself unless its machine is
    gone."""
    look_s: float = 0.5
    """Between two looks for calls whose replica is dead."""
    unheard_s: float = 2.0
    """How long a call may go without an output while the manager hears of others, and not of its replica."""
    reroute_s: float = 5.0
    """How long a prompt whose replica is gone may look for another one; without any, Serve would wait for a new one."""


class ReplicaCall:
    """The outputs of a streaming call, as an iterator. On the ingress's event loop."""

    def __init__(self, outputs: Any, progress: Progress, running: RunningReplicas, times: CallTimes) -> None:
        """`outputs`: what the Serve handle gave; `progress`: names the replica once there is one."""
        self._outputs = outputs
        self._progress = progress
        self._running = running
        self._times = times
        self._cancelled = False
        self._dead_since: float | None = None
        self._drains_since: float | None = None
        self._unheard_since: float | None = None

    def __aiter__(self) -> ReplicaCall:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises what the replica raised, or what Ray says of its end."""
        try:
            output: RequestOutput = await anext(self._outputs)
            self._unheard_since = None
        except (ActorUnavailableError, AioRpcError, RequestCancelledError, asyncio.CancelledError) as error:
            if self._cancelled or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
                raise
            raise await self._loss(error) from error
        return output

    def cancel(self) -> None:
        """The caller is no longer interested; the replica's task ends, which aborts the request in the engine."""
        self._cancelled = True
        self._end()

    def look(self, now: float) -> None:
        """End the call if its replica is dead and it does not end by itself. `now`: seconds of one clock."""
        if not self._running.is_dead(self._progress.replica):
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        elif now - self._dead_since >= self._times.last_outputs_s:
            self._end()

    def look_for_silence(self, now: float, silent: Collection[str]) -> None:
        """End the call when nothing has come of it for a while, and its replica is one of the `silent`.

        Its link may be cut, or it may stand still. Ray calls the first dead after most of a minute, the second never.
        """
        if self._progress.replica not in silent:
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = now
        elif now - self._unheard_since >= self._times.unheard_s:
            self._end()

    def look_for_drain(self, now: float, living: Collection[str], drain_s: float) -> None:
        """Say so when Serve has taken the replica out of service for `drain_s`, and waits for the calls that it has.

        `living`: names of those that requests are sent to; without any, there is nowhere to go.
        """
        name = self._progress.replica
        if not name or not living or name in living or self._running.is_dead(name):
            self._drains_since = None
        elif self._drains_since is None:
            self._drains_since = now
        elif now - self._drains_since >= drain_s:
            self._progress.on_drain()

    def _end(self) -> None:
        self._outputs.cancel()
        # Serve forgets a call that a replica has taken and of which nothing was asked yet.
        taken = self._outputs._replica_result_future
        if taken.done() and not taken.cancelled() and taken.exception() is None:
            taken.result().cancel()

    async def _loss(self, error: BaseException) -> BaseException:
        name = self._progress.replica
        death = await self._running.death(name, self._times.told_within_s) if name else None
        if death is not None:
            return death
        if isinstance(error, ActorUnavailableError) or (isinstance(error, AioRpcError) and error.code() not in _LOST):
            return error
        return ActorUnavailableError(f"its call ended with {type(error).__name__}", None)


def is_cancelled() -> bool:
    """Whether this very task is being cancelled: a `CancelledError` may also be what a replica's end looks like."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def merged(outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    """`outputs`, which are deltas, in order. What ends them is raised once all that came before it has been read.

    Close it to end the reading of `outputs`.
    """
    first = await anext(outputs, None)
    if first is None:
        return
    yield first
    waiting: RequestOutput | None = None
    end: BaseException | None = None
    changed = asyncio.Event()

    async def read() -> None:
        nonlocal waiting, end
        try:
            async for output in outputs:
                if waiting is None:
                    waiting = output
                else:
                    waiting.add(output, aggregate=True)
                    waiting.prompt_logprobs = waiting.prompt_logprobs or output.prompt_logprobs
                changed.set()
            end = StopAsyncIteration()
        except BaseException as error:
            end = error
        changed.set()

    reading = asyncio.ensure_future(read())
    try:
        while True:
            await changed.wait()
            if waiting is not None:
                output, waiting = waiting, None
                yield output
            elif end is None:
                changed.clear()
            elif isinstance(end, StopAsyncIteration):
                return
            else:
                raise end
    finally:
        reading.cancel()
