"""A replica: one vLLM engine, and its share in the cluster's KV cache. Prompts arrive tokenized."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from configs.settings import Settings, load_settings
from deployments.engine.engine_args import engine_config, engine_environment
from deployments.engine.heartbeat import HangWatch
from deployments.engine.model_identity import model_identity, weights_identity
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.kv_port import ARRIVED, FIDELITY, PLAN, TENANT
from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest, PinnedCall
from deployments.replica.manager_link import ManagerLink
from deployments.replica.prompt_plans import PromptPlans
from deployments.replica.serve_port import bind_to_node
from kvmanager.segments.keys import EXACT

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from deployments.protocol.wire import KVCacheUsage

logger = logging.getLogger(__name__)

LAST_WORDS_S = 0.5
"""Between an engine's death and its process's end: time for the errors to reach the requests."""


def _rank_now() -> int:
    return int(serve.get_replica_context().rank.rank)


class Replica:
    """Serve deployment class. Everything but the engine and the transfer threads runs on the replica's event loop."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        bind_to_node()
        settings = load_settings(args)
        os.environ.update(engine_environment(settings))
        from deployments.engine.host import start_engine

        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._node_id = ray.get_runtime_context().get_node_id()
        self._settings = settings
        self._orders: ManagerLink | None = None
        self._device: Any = None
        self._watch: HangWatch | None = None
        self._ending = False
        self._named: list[str] | None = None
        self._manager = ManagerClient(context.app_name)
        self._port: ClusterPort | None = None
        self._reuse: Any = None
        config = engine_config(settings)
        identity = model_identity(config, settings)
        self._llm, self._thread = start_engine(config, settings.engine.log_stats)
        if weights_identity(config) != identity.weights:
            raise RuntimeError(f"the files of model {settings.model} changed while they were loaded; start again")
        self._fingerprint = identity.fingerprint()
        if config.kv_transfer_config is not None:
            self._join_cache(context.app_name, settings)
        self._plans = PromptPlans(self._port, settings.block_size_tokens)
        # A step may wait for a layerwise load.
        slack_s = settings.engine.hang_s + (settings.kv.load_deadline_s if settings.kv.enabled else 0.0)
        self._watch = HangWatch(self._thread.heartbeat, slack_s, self._give_up)
        self._watch.start()
        self._orders = ManagerLink(
            self._manager,
            self._name,
            _rank_now,
            self._node_id,
            self._fingerprint,
            self._port,
            self._reuse,
            self._device,
        )

    @property
    def rank(self) -> int:
        """The replica's number now. Serve gives numbers anew when replicas come and go, so it is never kept."""
        return _rank_now()

    def _join_cache(self, app_name: str, settings: Settings) -> None:
        from deployments.engine.directive_runner import DirectiveRunner
        from deployments.engine.wiring import KVReuse

        self._port = ClusterPort(app_name, self._name, self._node_id, settings.kv, self._manager)
        self._reuse = KVReuse(
            self._thread,
            self._llm.vllm_config,
            settings,
            self._port,
            self._fingerprint,
            str(self.rank),
        )
        self._device = DirectiveRunner(self._reuse.control, self._thread.call)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs for one prompt, as they come. Cancelling the call aborts the request in the engine."""
        from vllm.v1.engine.exceptions import EngineDeadError

        from deployments.engine.step_witness import EngineDiedError

        if self._llm.errored:
            self._end_soon()
            raise EngineDiedError(self._suspects())
        try:
            async for output in self._outputs(request):
                yield output
        except EngineDeadError:
            raise EngineDiedError(self._suspects()) from None
        finally:
            if self._llm.errored:
                self._end_soon()

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        arrived = time.monotonic() - request.waited_s
        planned = await self._plans.ask(request)
        plan = planned.plan
        params = request.sampling_params
        # Whatever a client put there must not reach the connector: a plan comes from the manager only.
        transfer = {
            **({PLAN: plan} if plan else {}),
            **({TENANT: request.tenant} if request.tenant else {}),
            **({FIDELITY: request.fidelity, ARRIVED: arrived} if request.fidelity != EXACT else {}),
        }
        kept = {k: v for k, v in (params.extra_args or {}).items() if k != "kv_transfer_params"}
        params.extra_args = {**kept, **({"kv_transfer_params": transfer} if transfer else {})} or None
        admitted = False
        try:
            async for output in self._llm.generate(
                {"type": "token", "prompt_token_ids": request.prompt_token_ids, "cache_salt": request.cache_salt},
                params,
                request.request_id,
                priority=request.priority,
                reasoning_ended=request.reasoning_ended,
                reasoning_parser_kwargs=request.reasoning_parser_kwargs,
                trace_headers=request.trace_headers or None,
            ):
                admitted = True
                output.prompt_token_ids = None
                planned.begun()
                if output.finished:
                    planned.ended(output)
                    self._sign(output)
                yield output
        finally:
            planned.begun()
            if plan and self._port and not admitted:
                self._port.release(plan["lease_id"])

    def _suspects(self) -> list[str]:
        """Who may have ended the engine; the same answer to everybody."""
        if self._named is None:
            self._named = self._thread.witness.suspects()
            logger.error("suspects of the engine's death: %s", ", ".join(self._named) or "nobody")
        return self._named

    def _sign(self, output: RequestOutput) -> None:
        """Say in the usage which replica this is by now."""
        usage: KVCacheUsage | None = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)
        if usage is not None:
            usage["replica"] = str(self.rank)

    async def metrics(self, call: PinnedCall) -> str:
        """This process's Prometheus text: vLLM's own and the transfer counters. Does not wait for the engine."""
        from deployments.replica.metrics import replica_metrics_text

        del call
        rank = str(self.rank)
        if self._reuse is None:
            return await asyncio.to_thread(replica_metrics_text, rank)
        reuse, layers = self._reuse, self._reuse.layerwise.times
        return await asyncio.to_thread(
            replica_metrics_text, rank, self._port, reuse.transfer, reuse.usage, self._device, layers
        )

    def check_health(self) -> None:
        """Serve replaces the replica when this raises: the engine is dead."""
        if self._llm.errored:
            self._end_soon()
            raise RuntimeError(f"the engine of replica {self.rank} is dead: {self._thread.error!r}")

    def _give_up(self, why: str) -> None:
        """The engine hangs: its requests end at once, to be tried elsewhere. On the watch's thread."""
        from deployments.engine.host import EngineHungError

        self._thread.give_up(EngineHungError(why))
        self._end_soon("hung")

    def _end_soon(self, why: str = "dead") -> None:
        """The engine is dead: end the process, so that routers know at once and Serve starts another replica.

        Until then the replica would fail every request quickly and look idle, hence attractive. From any thread.
        """
        if not self._ending:
            self._ending = True
            logger.error("the engine of replica %d is dead, and the replica ends: %r", self.rank, self._thread.error)
            threading.Timer(LAST_WORDS_S, os._exit, (1,)).start()
            threading.Thread(target=self._say_that_it_ends, args=(why,), name="crosskv-last-words", daemon=True).start()

    def _say_that_it_ends(self, why: str) -> None:
        """The manager forgets the replica at once: it shall not count as running while its process still ends."""
        if self._orders:
            self._orders.close_from_thread()
        with contextlib.suppress(ManagerUnavailableError):
            self._manager.tell("replica_ends", self._name, why)

    def __del__(self) -> None:
        """Serve calls this after it has drained the replica's requests."""
        if self._watch:
            self._watch.close()
        if self._orders:
            self._orders.close()
        if self._reuse:
            self._reuse.close()
        if self._port:
            self._port.close()
        self._llm.shutdown()
