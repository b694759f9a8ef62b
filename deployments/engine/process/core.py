"""vLLM's engine process with crosskv in it: the connector's other half, the port to the cluster, the watches.

`run` takes the place of `EngineCoreProc.run_engine_core` as what vLLM spawns, and calls it, with a subclass in the
place of `EngineCoreProc`. vLLM's executor must be the one of a single process: the connector's two sides share memory.

Leans on vLLM: `EngineCoreProc.run_engine_core` builds whatever `vllm.v1.engine.core.EngineCoreProc` names;
`run_busy_loop` calls `_process_engine_step` in turns with `_handle_client_request` for each (type, request) of
`input_queue`, of which `EngineCoreRequestType.WAKEUP` does nothing; what goes into `output_queue` reaches the client.
`tests/deployments/engine/process/` holds streaming, abort, death and hang on a live one.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, ClassVar, TypeVar
from unittest import mock

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from configs.settings import Settings
from deployments.engine.adapters import load_adapters
from deployments.engine.crash_report import CrashReport
from deployments.engine.grammars.by_tenant import keep_grammars_apart
from deployments.engine.heartbeat import Heartbeat
from deployments.engine.process import channel
from deployments.engine.process.flight_recorder import FlightRecorder
from deployments.engine.process.service import ReuseService
from deployments.engine.process.surroundings import IDLE_STEP_EVERY_S, prepare_process, tolerant_module_scan
from deployments.engine.resume.runner import let_requests_resume
from deployments.engine.scheduling.steps import watch_steps
from deployments.engine.seeded_sampling import keep_seeds_exact, model_runner
from deployments.engine.wiring import KVReuse, why_not_moved
from deployments.protocol.log_lines import set_up_log
from deployments.protocol.memory import keep_giving_back
from kvmanager.segments.keys import AdapterName

T = TypeVar("T")

PULSE_EVERY_S = 0.5
_READ_S = 30.0
"""Within this a replica has read why its engine cannot be used."""
_CALL: Any = object()
"""In the place of a request's type: run this function."""
_stock_run = EngineCoreProc.run_engine_core


@dataclass(frozen=True)
class EngineSpec:
    """Configuration of an engine's process. `open_port` joins the cluster; it is called if KV is shared."""

    settings: Settings
    rank: str
    fingerprint: bytes
    open_port: Callable[[], Any] | None


@dataclass(frozen=True)
class Ready:
    """The engine's process may be asked. `why_not_shared`: a sentence where its KV cannot be moved.

    `terms`: what plans must say for its load paths, by name. `adapters`: what a request brings for each LoRA adapter
    that it has.
    """

    why_not_shared: str | None = None
    terms: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[AdapterName, LoRARequest] = field(default_factory=dict)


def run(spec: EngineSpec, recorder: FlightRecorder, connected: socket.socket, *args: Any, **kwargs: Any) -> None:
    """The engine process's whole life. On its main thread."""
    threading.Thread(target=_live_with_replica, args=(recorder,), name="crosskv-pulse", daemon=True).start()
    prepare_process()
    set_up_log(spec.settings.http.log_format)
    keep_giving_back()

    class Core(ReplicaEngineCore):
        pass

    Core.spec, Core.recorder, Core.connected = spec, recorder, connected
    code = 1
    try:
        with mock.patch("vllm.v1.engine.core.EngineCoreProc", Core), tolerant_module_scan():
            _stock_run(*args, **kwargs)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        # Everything is closed. Python would take seconds to take its modules apart, and the replica waits for it; where
        # the engine was not built to its end, for ever, in what vLLM would have closed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ReplicaEngineCore(EngineCoreProc):
    """See the module's docstring. An `EngineLoop`."""

    spec: ClassVar[EngineSpec]
    recorder: ClassVar[FlightRecorder]
    connected: ClassVar[socket.socket]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.on_turn: Callable[[], None] = lambda: None
        self._service: ReuseService | None = None
        self._step_again = False
        self._loops = False
        self._thread_id = threading.get_ident()
        self._after_step: list[Callable[[], None]] = []
        try:
            super().__init__(*args, **kwargs)
        except Exception as error:
            channel.say(self.connected, error)
            raise
        try:
            ready = self._join()
        except Exception as error:
            channel.say(self.connected, error)
            # vLLM's client takes the engine for started, and waits ten minutes for what a thread of it is to send yet.
            # It ends this process when it has read why.
            channel.wait_for_end(self.connected, _READ_S)
            raise
        channel.say(self.connected, ready)
        threading.Thread(target=self._answer, name="crosskv-answers", daemon=True).start()

    def _join(self) -> Ready:
        """Build crosskv's parts around vLLM's."""
        spec = self.spec
        keep_seeds_exact(self)
        let_requests_resume(self)
        keep_grammars_apart(self.structured_output_manager)
        watch_steps(self.scheduler)
        self.heartbeat = Heartbeat(beat=self.recorder.beat)
        self.heartbeat.watch(self.scheduler)
        self.heartbeat.hear_compilation()
        self._crash_report = CrashReport(self.recorder)
        self._crash_report.watch(self.scheduler)
        adapters = load_adapters(self, spec.settings)
        if self.vllm_config.kv_transfer_config is None:
            return Ready(adapters=adapters)
        why = why_not_moved(self, self.vllm_config, spec.settings)
        if why is None:
            assert spec.open_port is not None
            with _signals_kept():
                port = spec.open_port()
            reuse = KVReuse(self, self.vllm_config, spec.settings, port, spec.fingerprint, spec.rank)
            self._service = ReuseService(reuse, port)
            return Ready(terms=reuse.terms, adapters=adapters)
        return Ready(why, adapters=adapters)

    @property
    def runner(self) -> Any:
        """vLLM's model runner: for the engine thread."""
        return model_runner(self)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine thread, between two steps; the future carries its result or error.

        A call from the engine thread itself waits for the next step: vLLM empties its queue before a step, so repeated
        calls would hold up decoding.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        if self._loops and threading.get_ident() == self._thread_id:
            self._after_step.append(run)
        elif self._loops:
            self.input_queue.put_nowait((_CALL, run))
        else:  # the engine thread itself is still building
            run()
        return future

    def wake(self) -> None:
        """Wake the engine for an event that it may be waiting for, before its next idle step. From any thread."""
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def run_busy_loop(self) -> None:
        """vLLM's; leaves the last words of an engine that raises."""
        self._loops = True
        try:
            super().run_busy_loop()
        except SystemExit:
            raise
        except BaseException as error:
            self.recorder.died(error, self._crash_report.suspects())
            raise

    def shutdown(self) -> None:
        """vLLM's, after what was saved and reported so far is on its way."""
        service, self._service = self._service, None
        if service is not None:
            service.close()
        super().shutdown()

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        with self.heartbeat.turn():
            if request_type is not _CALL:
                super()._handle_client_request(request_type, request)
                return
            request()
        if not self.scheduler.has_requests():
            self.on_turn()
            self._call_what_waits()

    def _call_what_waits(self) -> None:
        """The engine thread's own calls come next: a step has been made, or there is none to make."""
        waiting, self._after_step = self._after_step, []
        for run in waiting:
            self.input_queue.put_nowait((_CALL, run))

    def _process_engine_step(self) -> bool:
        """Run a step and what `EngineThread` does around one; after an idle step wait a short time for any input."""
        if not self.scheduler.has_requests():
            return False
        with self.heartbeat.turn():
            outputs, executed = self.step_fn()
            for output in outputs.items() if outputs else ():
                self.output_queue.put_nowait(output)
            self.post_step(executed)
            self._crash_report.step_ended()
            self.on_turn()
        self._call_what_waits()
        if executed or not self.scheduler.has_requests() or self._step_again:
            self._step_again = False
        else:
            with contextlib.suppress(queue.Empty):
                self._handle_client_request(*self.input_queue.get(timeout=IDLE_STEP_EVERY_S))
                self._step_again = True  # vLLM hears in one step that a load has ended, and computes in the next
        return executed

    def _answer(self) -> None:
        asyncio.run(channel.answer(self.connected, self._service))


def _live_with_replica(recorder: FlightRecorder) -> None:
    """Show that this process runs, and end it with the replica's, however that ends."""
    replica = multiprocessing.parent_process()
    assert replica is not None
    beat = recorder.beat
    while not wait([replica.sentinel], PULSE_EVERY_S):
        beat.pulse += 1
    os._exit(1)


@contextlib.contextmanager
def _signals_kept() -> Any:
    """Keep vLLM's signal handlers, which end its engine in order; joining a cluster may replace them."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
