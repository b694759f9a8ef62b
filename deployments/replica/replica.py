"""A replica: one vLLM engine, and its share in the cluster's KV cache. Prompts arrive tokenized."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from configs.settings import load_settings
from deployments.engine.engine_args import engine_environment
from deployments.port.cluster_port import ClusterPort, OpenThere
from deployments.protocol.families import labelled
from deployments.protocol.log_lines import lines_of, set_up_log
from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError
from deployments.protocol.memory import keep_giving_back, modules_set_aside
from deployments.protocol.stage_stamps import STAGE_STAMPS, StageStamps
from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE, NOT_READ, GenerateRequest, PinnedCall
from deployments.replica.manager_link import ManagerLink
from deployments.replica.prompt_plans import PromptPlan, PromptPlans
from deployments.replica.serve_process import bind_to_node
from kvmanager.scaling.demand import ReplicaLoad

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from deployments.engine.handle import EngineHandle
    from deployments.protocol.wire import KVCacheUsage


logger = logging.getLogger(__name__)


def _stamp(output: RequestOutput, received: float, planned: float, yielded: float) -> None:
    """Put the prompt's stamps into its last output; vLLM's serving classes never see them."""
    transfer = output.kv_transfer_params or {}
    load = transfer.get(KV_CACHE_USAGE, {}).pop("load", None)
    stamps = StageStamps.of(received, planned, yielded, load, output.metrics)
    output.kv_transfer_params = {**transfer, STAGE_STAMPS: stamps}


def _not_read(request: GenerateRequest) -> RequestOutput:
    """Return the answer to a prompt that this replica need not compute: no token, and why."""
    from vllm.outputs import RequestOutput

    told = {NOT_READ: True}
    return RequestOutput(request.request_id, None, None, None, [], finished=True, kv_transfer_params=told)


def _rank_now() -> int:
    return int(serve.get_replica_context().rank.rank)


class Replica:
    """Serve deployment class. On the replica's event loop; the engine is behind its handle."""

    _loop: asyncio.AbstractEventLoop | None = None
    """Where requests are answered; None: none has come."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        bind_to_node()
        settings = load_settings(args)
        os.environ.update(engine_environment(settings))
        set_up_log(settings.http.log_format)
        keep_giving_back()
        with modules_set_aside():
            from deployments.engine.handle import EngineHandle

        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        here = ray.get_runtime_context()
        node_id = here.get_node_id()
        self._link: ManagerLink | None = None
        self._engine: EngineHandle | None = None
        self._ending = False
        self._manager = ManagerClient(context.app_name)
        open_port = partial(ClusterPort, context.app_name, self._name, node_id, settings.kv, self._manager)
        there = OpenThere(here.gcs_address, context.app_name, self._name, node_id, settings.kv)
        self._engine = EngineHandle(settings, self._name, self.rank, node_id, open_port, self._end_soon, there)
        self._plans = PromptPlans(self._engine if self._engine.shares_kv else None, settings.block_size_tokens)
        self._link = ManagerLink(self._manager, self._name, _rank_now, node_id, self._engine)

    @property
    def rank(self) -> int:
        """The replica's number now. Serve reassigns numbers when replicas come and go, so it is never kept."""
        return _rank_now()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs for one prompt, as they come. Cancelling the call aborts the request in the engine.

        Raises EngineDiedError when the engine is dead, or dies meanwhile; GenerationError for an answer that another
        model began.
        """
        from vllm.exceptions import GenerationError

        from deployments.engine.crash_report import EngineDiedError
        from deployments.engine.handle import EnginePrompt

        assert self._engine is not None
        self._loop = asyncio.get_running_loop()
        if self._engine.dead:
            self._end_soon()
            raise EngineDiedError(self._suspects())
        if request.precomputes and not self._plans.has_terms(request.precomputes):
            yield _not_read(request)
            return
        if request.resumed_tokens and request.fingerprint != self._engine.fingerprint:
            raise GenerationError("The model was replaced while this answer was under way.")
        received = time.monotonic()
        try:
            with lines_of(request.client_request_id):
                planned = await self._plans.ask(request)
            planned_at, yielded_at = time.monotonic(), 0.0
            try:
                # However short, what is decoded elsewhere must be stored, and what is precomputed.
                short_tokens = 1 if request.store_within_s or request.precomputes else planned.short_tokens
                prompt = EnginePrompt(request, planned.plan, received - request.waited_s, short_tokens, planned.salt)
                async for output in self._engine.generate(prompt):
                    planned.begun()
                    if not yielded_at:
                        yielded_at = time.monotonic()
                        self._sign_first(output, planned)
                    if output.finished:
                        with lines_of(request.client_request_id):
                            planned.ended(output)
                        self._sign(output)
                        _stamp(output, received, planned_at, yielded_at)
                        if request.store_within_s and goes_on(output):
                            yield take_token(output, request.sampling_params)
                            if not await self._engine.saved(request.store_within_s):
                                with lines_of(request.client_request_id):
                                    logger.info("request %s is handed over before its KV is stored", request.request_id)
                    else:
                        output.metrics = None  # only the last output's are read; they are half of unpickling one
                    yield output
            finally:
                planned.begun()
        except EngineDiedError:
            raise EngineDiedError(self._suspects()) from None
        finally:
            if self._engine.dead:
                self._end_soon()

    def _suspects(self) -> Sequence[str] | None:
        """Requests that may have ended the engine: the same answer to every prompt, so that none leaves one out."""
        assert self._engine is not None
        return self._engine.suspects()

    def _sign_first(self, output: RequestOutput, planned: PromptPlan) -> None:
        """The first output says as much as the last one, in case another replica gives that one."""
        usage: KVCacheUsage | None = getattr(output, FIRST_USAGE, None)
        if usage is not None:
            planned.give_reason(usage)
            usage["replica"] = str(self.rank)
            usage.pop("load", None)

    def _sign(self, output: RequestOutput) -> None:
        """Say in the usage which replica this is by now."""
        usage: KVCacheUsage | None = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)
        if usage is not None:
            usage["replica"] = str(self.rank)

    async def metrics(self, call: PinnedCall) -> list[Metric]:
        """Return this process's metrics, labelled by rank: vLLM labels by engine, and all replicas would say 0."""
        del call
        assert self._engine is not None
        return labelled(await self._engine.metrics(), replica=str(self.rank))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's load, for Serve's autoscaling (`kvmanager.scaling.demand`); empty while it is not known.

        Serve asks again and again where the number of replicas follows the load, and never otherwise.
        """
        assert self._engine is not None
        queued_s, pressure = self._plans.queued_s, await self._engine.kv_pressure()
        if queued_s is None or pressure is None:
            return {}
        return ReplicaLoad(queued_s, pressure, self._engine.ongoing, self._engine.waiting).stats()

    def check_health(self) -> None:
        """Serve replaces the replica when this raises: the engine is dead."""
        assert self._engine is not None
        if self._engine.dead:
            self._end_soon()
            raise RuntimeError(f"the engine of replica {self.rank} is dead: {self._engine.dead}")

    def _end_soon(self, why: str = "dead") -> None:
        """The engine is dead: end the process, so that routers know at once and Serve starts another replica.

        Until then the replica would fail every request quickly and look idle, hence attractive. From any thread.
        """
        if not self._ending:
            self._ending = True
            why_dead = self._engine.dead if self._engine else why
            logger.error("the engine of replica %d is dead, and the replica ends: %s", self.rank, why_dead)
            end_process_once_told(lambda: self._engine.ongoing if self._engine else 0, self._loop)
            threading.Thread(target=self._say_that_it_ends, args=(why,), name="crosskv-last-words", daemon=True).start()

    def _say_that_it_ends(self, why: str) -> None:
        """Make the manager forget the replica at once: it must not count as running while its process still ends."""
        if self._link:
            self._link.close_from_thread()
        with contextlib.suppress(ManagerUnavailableError):
            self._manager.tell("replica_ends", self._name, why)

    def __del__(self) -> None:
        """Serve calls this after it has drained the replica's requests."""
        if self._link:
            self._link.close()
            if not self._ending:
                with contextlib.suppress(ManagerUnavailableError):
                    self._manager.tell("replica_ends", self._name)
        if self._engine:
            self._engine.close()


# The end of a replica's process after its engine's death: once every request has heard of it.
#
# The error that a request gets names those which may have ended the engine. A request that only sees its process end
# knows nothing, is tried again, and may end a second engine. How long the errors take depends on the machine: on a busy
# one a process may not run for half a second.


LAST_WORDS_S = 0.5
"""Between the last request's error and the process's end: by then Ray has sent it."""
TURNS = 20
"""Of the event loop in that time, at least: where the process hardly runs, they take longer."""
MOST_LAST_WORDS_S = 10.0
"""From the engine's death on, whatever is still under way."""


def end_process_once_told(ongoing: Callable[[], int], loop: asyncio.AbstractEventLoop | None) -> threading.Thread:
    """End this process with status 1 when `ongoing()`, the number of requests in the engine, is 0 and all is sent.

    `loop` carries the requests; None: there was none. Returns the thread that waits.
    """
    thread = threading.Thread(target=_wait_and_end, args=(ongoing, loop), name="crosskv-end", daemon=True)
    thread.start()
    return thread


def _wait_and_end(ongoing: Callable[[], int], loop: asyncio.AbstractEventLoop | None) -> None:
    latest = time.monotonic() + MOST_LAST_WORDS_S
    quiet_turns = 0
    while quiet_turns < TURNS and time.monotonic() < latest:
        time.sleep(LAST_WORDS_S / TURNS)
        if loop is not None:
            turn = threading.Event()
            with contextlib.suppress(RuntimeError):  # it is closed, and carries nothing any more
                loop.call_soon_threadsafe(turn.set)
                turn.wait(latest - time.monotonic())
        quiet_turns = 0 if ongoing() else quiet_turns + 1
    os._exit(1)


# A prompt's first token goes to the client at once, and its end when the KV is stored for the replica that continues.
#
# A prefill replica samples one token and ends. vLLM gives that token and that end as one output; here they become two.
# The text of the first is what an answer that goes on would show: what may still become a stop string is held back, as
# `vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer` (0.32.0) does, for the continuation shows it. On the replica's
# event loop.


HANDED_OVER = "length"
"""The finish reason of a prompt that could have gone on; with any other the answer is whole."""


def goes_on(output: RequestOutput) -> bool:
    """Whether this last output is only the end of a prefill."""
    return output.outputs[0].finish_reason == HANDED_OVER


def take_token(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Split a last output of one answer that is sent piece by piece: return its token as an output of its own.

    `output` keeps its end, and what is said of the prompt.
    """
    first = copy.copy(output)
    end = output.outputs[0]
    token = copy.copy(end)
    token.finish_reason = token.stop_reason = None
    held_back = _held_back_chars(params)
    token.text = token.text[: max(0, len(token.text) - held_back)]
    first.finished, first.outputs, first.kv_transfer_params, first.metrics = False, [token], None, None
    end.token_ids, end.text, end.logprobs = [], "", None
    return first


def _held_back_chars(params: SamplingParams) -> int:
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return max(map(len, stops)) - 1 if stops and not params.include_stop_str_in_output else 0
