"""The replica's end of an engine in a process of its own: vLLM's stock AsyncLLM, and what of the engine lies outside.

Leans on vLLM: `CoreEngineProcManager` spawns `EngineCoreProc.run_engine_core` and keeps its `processes`, which
`AsyncMPClient.resources.engine_manager` has; where one ends, vLLM's own monitor ends the requests with EngineDeadError.
`vllm.envs.VLLM_RPC_BASE_PATH` is the folder of the sockets between them, which both open before the engine is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from deployments.engine.checks import check_engine_config
from deployments.engine.crash_report import sender_id
from deployments.engine.heartbeat import Beat
from deployments.engine.metrics import port_families
from deployments.engine.process import channel
from deployments.engine.process.core import PULSE_EVERY_S, EngineSpec, Ready, run
from deployments.engine.process.flight_recorder import FlightRecorder
from deployments.engine.resume.front import hear_what_was_said
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.families import added

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from deployments.port.cluster_port import ClusterPort
    from kvmanager.moves.directives import DirectiveOrder, DirectiveResult

WIRED_S = 120.0
"""How long the cache's parts may take to be built when vLLM says that the engine is ready."""


class EngineProcess:
    """A replica's view of its engine's process. `give_up` and `error` from any thread."""

    def __init__(self, llm: AsyncLLM, recorder: FlightRecorder, connected: socket.socket) -> None:
        self.asker = channel.Asker(connected)
        """Asks the `deployments.engine.process.service.ReuseService` there."""
        self.beat: Beat = recorder.beat
        self._recorder = recorder
        self._given_up: BaseException | None = None
        self._stood_still = False
        core: Any = llm.engine_core
        self._processes = core.resources.engine_manager.processes

    @property
    def error(self) -> BaseException:
        """What ended the engine, of a dead one."""
        if self._given_up is not None:
            return self._given_up
        codes = [process.exitcode for process in self._processes]
        return RuntimeError(self._recorder.last_words or f"the engine's process ended by itself; exit codes: {codes}")

    def suspects(self, not_begun: Sequence[str], begun: Sequence[str]) -> list[str] | None:
        """Requests that may have ended the engine; see `FlightRecorder`. The replica's books: requests without an
        output, and with one. None of a process that was killed or stopped: that need not concern any request.
        """
        killed = any(process.exitcode == -signal.SIGKILL for process in self._processes)
        if self._stood_still or (killed and self._given_up is None):
            return None
        noted = self._recorder.suspects()
        return list(not_begun or begun) if noted is None else sorted({sender_id(name) for name in noted})

    def give_up(self, error: BaseException) -> None:
        """The engine hangs: its process is ended, stopped or not, and vLLM ends the requests. Blocks for a second."""
        self._given_up = error
        pulse = self.beat.pulse
        time.sleep(2 * PULSE_EVERY_S)
        self._stood_still = self.beat.pulse == pulse
        for process in self._processes:
            process.kill()


class RemoteService:
    """A `ReuseService` in the engine's process, asked from here, and the replica's own port, which plans."""

    def __init__(self, asker: channel.Asker, port: ClusterPort) -> None:
        self._asker = asker
        self._port = port

    async def register(self, replica: str, rank: int, node_id: str, facts: EngineFacts) -> None:
        """See `ReuseService`."""
        await self._asker.ask("register", replica, rank, node_id, facts)

    async def needs_resync(self) -> bool:
        """See `ReuseService`."""
        return bool(await self._asker.ask("needs_resync"))

    async def carry_out(self, order: DirectiveOrder) -> DirectiveResult:
        """See `ReuseService`."""
        result: DirectiveResult = await self._asker.ask("carry_out", order)
        return result

    async def saved(self, within_s: float) -> bool:
        """See `ReuseService`."""
        return bool(await self._asker.ask("saved", within_s))

    async def look_after_tier(self) -> None:
        """The replica's port starts a tier where there is none; the engine's finds it."""
        await asyncio.to_thread(self._port.look_after_tier)
        await self._asker.ask("look_after_tier")

    async def usage(self) -> dict[str, int]:
        """See `ReuseService`."""
        usage: dict[str, int] = await self._asker.ask("usage")
        return usage

    async def families(self) -> list[Metric]:
        """Those of both ports, added."""
        theirs: list[Metric] = await self._asker.ask("families")
        return added([*theirs, *port_families(self._port)])

    def close(self) -> None:
        """End the replica's port; the other one ends with the engine's process."""
        self._port.close()
        self._asker.close()


def start_engine_process(config: VllmConfig, spec: EngineSpec) -> tuple[AsyncLLM, EngineProcess, Ready]:
    """Load the model in a process of its own; return vLLM's AsyncLLM over it, and what it said when it was ready.

    Blocks while loading. `spec` can be pickled. Raises what vLLM, or the cache's parts, raised there, and ValueError
    for a configuration with which KV would not be exact.
    """
    check_engine_config(config)
    recorder = FlightRecorder.shared()
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as unless_started, tempfile.TemporaryDirectory(prefix="crosskv-") as sockets:
        unless_started.callback(ours.close)
        # Where vLLM puts them, in the folder for everybody, a lax umask would let others read and write prompts.
        with theirs, mock.patch("vllm.envs.VLLM_RPC_BASE_PATH", sockets):
            target = partial(run, spec, recorder, theirs)
            with mock.patch("vllm.v1.engine.core.EngineCoreProc.run_engine_core", target):
                try:
                    llm = AsyncLLM(
                        vllm_config=config,
                        executor_class=Executor.get_class(config),
                        log_stats=True,
                        log_requests=False,
                    )
                except RuntimeError as error:
                    theirs.close()  # so that an ended process is not waited for
                    raise _why(channel.hear(ours, WIRED_S)) or error from None
        unless_started.callback(llm.shutdown)
        said = channel.hear(ours, WIRED_S)
        if not isinstance(said, Ready):
            ours.close()  # it has been heard: the process need not wait for that, nor vLLM for the process
            raise _why(said) or RuntimeError("the engine's process ended while the cache's parts were built")
        unless_started.pop_all()
    hear_what_was_said(llm)
    return llm, EngineProcess(llm, recorder, ours), said


def _why(said: Any) -> Exception | None:
    """The error that the process ended with, if it said so."""
    return said if isinstance(said, Exception) else None
