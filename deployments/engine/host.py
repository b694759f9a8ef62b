"""vLLM's EngineCore on a thread of the replica's own process.

Leans on vLLM, and this module is the only one that does so for running the engine:

* `vllm.v1.engine.core.EngineCore` — `preprocess_add_request`, `add_request`, `abort_requests`, `step_fn`, `post_step`,
  `scheduler`, `get_supported_tasks`, `reset_prefix_cache`, `shutdown`; of the scheduler `has_requests` and `schedule`,
  and of what that returns `num_scheduled_tokens`, `scheduled_new_reqs`, `scheduled_cached_reqs`; its
  `executor_fail_callback`, called when a process of a rank has ended;
* `vllm.v1.engine` — `EngineCoreRequest`, `EngineCoreOutputs`, and `EngineCoreOutput` with `FinishReason.ERROR`;
* `vllm.v1.engine.async_llm.AsyncLLM` — takes its engine from `EngineCoreClient.make_async_mp_client`, which we replace
  for the time of the constructor; of that client it uses only what `InProcessClient` defines.

Stock AsyncLLM runs three processes and 1.9 GB per replica on the CPU backend; this runs one and 0.7 GB, loads faster,
lets the KV connector speak to Ray natively, and lets us run code on the engine thread between two steps, which is the
only place where vLLM's block pool may be touched (DESIGN §7). `tests/deployments/engine/test_engine_host.py` holds
streaming, concurrency, abort and engine death, and fails when one of the symbols above changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from deployments.engine.checks import check_engine_config
from deployments.engine.crash_report import CrashReport
from deployments.engine.grammars.by_tenant import keep_grammars_apart
from deployments.engine.heartbeat import Beat, Heartbeat
from deployments.engine.process.surroundings import IDLE_STEP_EVERY_S, prepare_process, tolerant_module_scan
from deployments.engine.resume.front import hear_what_was_said
from deployments.engine.resume.runner import let_requests_resume
from deployments.engine.scheduling.steps import watch_steps
from deployments.engine.seeded_sampling import keep_seeds_exact, model_runner
from deployments.protocol.log_lines import engine_request_id, lines_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineHungError(Exception):
    """The engine thread does not come back from a step, or from a call."""


class RankDiedError(Exception):
    """A process of a tensor-parallel engine has ended."""


class EngineThread:
    """Owns an `EngineCore`: builds it, steps it and calls it, all on one thread.

    `call` may be used from any thread. After a failed step, or `give_up`, the engine is dead: `error` is set, every
    later call raises `EngineDeadError`, and the waiting client is told.
    """

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool) -> None:
        self.core: EngineCore
        self.error: BaseException | None = None
        self.heartbeat = Heartbeat()
        self.crash_report = CrashReport()
        self.on_turn: Callable[[], None] = lambda: None
        """Called on the engine thread after every step and after calls between steps; must not block or raise."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._awake = threading.Event()
        self._on_outputs: Callable[[EngineCoreOutputs], None] = lambda outputs: None
        self._on_death: Callable[[BaseException], None] = lambda error: None
        self._closing = False
        self._ended = False
        self._built: Future[EngineCore] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(vllm_config, executor_class, log_stats), name="crosskv-engine", daemon=True
        )
        self._thread.start()
        self.core = self._built.result()

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler: for the engine thread."""
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        """vLLM's model runner: for the engine thread."""
        return model_runner(self.core)

    @property
    def beat(self) -> Beat:
        """For a `HangWatch`."""
        return self.heartbeat.beat

    def suspects(self, not_begun: Sequence[str], begun: Sequence[str]) -> list[str] | None:
        """Requests that may have ended the engine, by the scheduler's books; the replica's are not needed."""
        return self.crash_report.suspects()

    def subscribe(
        self, on_outputs: Callable[[EngineCoreOutputs], None], on_death: Callable[[BaseException], None]
    ) -> None:
        """Both callbacks run on the engine thread, `on_death` also on `give_up`'s, and must not block."""
        self._on_outputs, self._on_death = on_outputs, on_death

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine thread, between two steps; the future carries its result or error."""
        future: Future[T] = Future()
        if self.error is not None or self._closing:
            future.set_exception(EngineDeadError())
            return future

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    if self._ended:
                        raise EngineDeadError()
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._inbox.put(run)
        self.wake()
        if self._ended:  # the engine thread has looked into its inbox for the last time
            self._refuse_what_waits()
        return future

    def wake(self) -> None:
        """Wake the engine for an event that it may be waiting for, before its next idle step. From any thread."""
        self._awake.set()

    def give_up(self, error: BaseException) -> None:
        """The engine thread hangs: it counts as dead from now on, even if it comes back. From another thread."""
        if self.error is None and not self._ended:
            self.error = error
            self._refuse_what_waits()
            self._on_death(error)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Stop stepping and release the engine. Idempotent; from any thread but the engine's."""
        if not self._closing:
            self._closing = True
            self._inbox.put(None)
            self.wake()
        self._thread.join(timeout_s)

    def _rank_died(self) -> None:
        """A rank's process has ended: so has the engine, also one that waits for requests. From vLLM's thread."""
        self.give_up(RankDiedError("a process of the model's ranks has ended"))
        self._inbox.put(None)

    def _run(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool) -> None:
        try:
            core = EngineCore(vllm_config, executor_class, log_stats, executor_fail_callback=self._rank_died)
            keep_seeds_exact(core)
            let_requests_resume(core)
            keep_grammars_apart(core.structured_output_manager)
            watch_steps(core.scheduler)
        except BaseException as error:
            self._built.set_exception(error)
            return
        self.heartbeat.watch(core.scheduler)
        self.crash_report.watch(core.scheduler)
        forget_compilation = self.heartbeat.hear_compilation()
        self._built.set_result(core)
        try:
            self._step_until_closed(core)
        except BaseException as error:
            logger.exception("the engine died")
            if self.error is None:
                self.error = error
                self._on_death(error)
        forget_compilation()
        self._refuse_what_waits()
        with contextlib.suppress(Exception):
            core.shutdown()

    def _step_until_closed(self, core: EngineCore) -> None:
        step_again = False
        while True:
            if not self._drain_inbox(block=not core.scheduler.has_requests()):
                return
            if not core.scheduler.has_requests():
                self.on_turn()
                continue
            with self.heartbeat.turn():
                outputs, executed = core.step_fn()
                core.post_step(executed)
                self.crash_report.step_ended()
                self.on_turn()
            if self._ended:  # it was given up
                return
            if outputs:
                for output in outputs.values():
                    self._on_outputs(output)
            if executed or not core.scheduler.has_requests():
                continue
            if step_again:
                step_again = False
            elif self._awake.wait(IDLE_STEP_EVERY_S):
                self._awake.clear()
                step_again = True  # vLLM hears in one step that a load has ended, and computes in the next

    def _drain_inbox(self, block: bool) -> bool:
        """Run everything that waits now (at least one item if `block`); False when the thread must end.

        What is put in meanwhile waits for the next step, so repeated calls do not hold up decoding.
        """
        left = self._inbox.qsize()
        while block or left > 0:
            item = self._inbox.get()
            if item is None or self._ended:
                return False
            with self.heartbeat.turn():
                item()
            left = self._inbox.qsize() if block else left - 1
            block = False
        return True

    def _refuse_what_waits(self) -> None:
        """Calls that arrived too late fail instead of hanging."""
        self._closing = self._ended = True
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if item is not None:
                    with contextlib.suppress(Exception):
                        item()


class InProcessClient:
    """The part of vLLM's `AsyncMPClient` that AsyncLLM needs, over an `EngineThread` instead of sockets.

    Built before or inside the event loop; every async method belongs to the loop that first awaits one of them.
    """

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._outputs: asyncio.Queue[EngineCoreOutputs | BaseException] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next step's outputs. Raises EngineDeadError once the engine has died."""
        self._subscribe()
        item = await self._outputs.get()
        if isinstance(item, BaseException):
            raise EngineDeadError() from item
        return item

    def _subscribe(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self.thread.subscribe(self._post, self._die)
            if self.thread.error is not None:
                self._die(self.thread.error)

    def _post(self, item: EngineCoreOutputs | BaseException) -> None:
        assert self._loop is not None
        if self._loop.is_closed():
            return
        if isinstance(item, BaseException) or item.outputs or item.scheduler_stats:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, item)

    def _die(self, error: BaseException) -> None:
        self.resources.engine_dead = True
        self._post(error)

    async def _call(self, function: Callable[[], T]) -> T:
        # Shielded: a caller that stops waiting does not take back what it asked, an abort above all.
        return await asyncio.shield(asyncio.wrap_future(self.thread.call(function)))

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Hand a request to the engine, which takes it before its next step.

        Does not wait for the step under way: `AsyncLLM.generate` aborts only what it has added, so a client that left
        meanwhile would leave its request behind, computed to the end in vain. A request that the engine cannot take
        ends with vLLM's finish reason "error", as in vLLM's own engine process. Raises EngineDeadError.
        """
        self._subscribe()  # the engine may answer before a caller awaits its first output
        core = self.thread.core

        def add() -> None:
            try:
                prepared, wave = core.preprocess_add_request(request)
                core.add_request(prepared, wave)
            except Exception:
                params = request.sampling_params
                extra = (params.extra_args if params is not None else None) or {}
                with lines_of(engine_request_id(extra.get("kv_transfer_params"))):
                    logger.exception("the engine cannot take request %s", request.request_id)
                refused = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
                self._post(EngineCoreOutputs(outputs=[refused]))

        added = self.thread.call(add)
        if added.done():  # at once: the engine is dead, or has taken it
            added.result()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort requests, by the engine's own ids."""
        if request_ids and not self.resources.engine_dead:
            await self._call(lambda: self.thread.core.abort_requests(request_ids))

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        """What the model can do."""
        return await self._call(self.thread.core.get_supported_tasks)

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; False while blocks are in use."""
        return await self._call(lambda: self.thread.core.reset_prefix_cache(reset_running_requests, reset_connector))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine thread."""
        self.resources.engine_dead = True
        self.thread.shutdown(timeout if timeout is not None else 10.0)


def start_engine(config: VllmConfig) -> tuple[AsyncLLM, EngineThread]:
    """Load the model and return vLLM's AsyncLLM over an engine thread of this process. Blocks while loading.

    Raises whatever vLLM raises for a configuration it refuses, and ValueError for one with which KV would not be exact.
    """
    check_engine_config(config)
    prepare_process()
    with _client_in_process() as threads, tolerant_module_scan():
        llm = AsyncLLM(
            vllm_config=config, executor_class=Executor.get_class(config), log_stats=True, log_requests=False
        )
    hear_what_was_said(llm)
    return llm, threads[0]


@contextlib.contextmanager
def _client_in_process() -> Iterator[list[EngineThread]]:
    threads: list[EngineThread] = []

    def make_client(vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: Any) -> Any:
        threads.append(EngineThread(vllm_config, executor_class, log_stats))
        return InProcessClient(threads[0])

    with mock.patch("vllm.v1.engine.async_llm.EngineCoreClient.make_async_mp_client", make_client):
        yield threads
