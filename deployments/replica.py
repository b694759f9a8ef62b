"""A replica: one vLLM engine, and its share in the cluster's KV cache. Prompts arrive tokenized."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from configs.settings import Settings, load_settings
from deployments.engine_args import engine_config, engine_environment, model_identity
from deployments.faulty_manager import manager_client
from deployments.kv_port import PLAN
from deployments.manager_client import ManagerUnavailableError
from deployments.ray_port import RayPort
from deployments.wire import GenerateRequest

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

ORDERS_WAIT_S = 2.0
"""How long one poll for orders waits at the manager; each poll is also the replica's heartbeat."""
MANAGER_ANSWER_S = 5.0
MANAGER_RETRY_S = 0.5
LAST_WORDS_S = 0.5
"""Between an engine's death and its process's end: time for the errors to reach the requests."""


@dataclass(frozen=True, slots=True)
class PinnedCall:
    """An argument that sends a call of any method to one replica: the router reads `replica_pin`."""

    replica_pin: int


class Replica:
    """Serve deployment class. Everything but the engine and the transfer threads runs on the replica's event loop."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        settings = load_settings(args)
        os.environ.update(engine_environment(settings))
        from deployments.engine_host import start_engine

        context = serve.get_replica_context()
        self.rank = context.rank.rank
        self._name = context.replica_id.unique_id
        self._node_id = ray.get_runtime_context().get_node_id()
        self._settings = settings
        self._orders: asyncio.Task[None] | None = None
        self._ending = False
        self._manager = manager_client(context.app_name, settings.faults)
        self._port: RayPort | None = None
        self._reuse: Any = None
        config = engine_config(settings)
        identity = model_identity(config)
        self._llm, self._thread = start_engine(config, settings.engine.log_stats)
        if model_identity(config) != identity:
            raise RuntimeError(f"the files of model {settings.model} changed while they were loaded; start again")
        self._fingerprint = identity.fingerprint()
        if settings.kv.enabled:
            self._join_cache(context.app_name, settings)
        self._orders = asyncio.get_running_loop().create_task(self._obey())

    def _join_cache(self, app_name: str, settings: Settings) -> None:
        from deployments.kv_reuse import KVReuse

        self._port = RayPort(app_name, self._name, self._node_id, settings.kv, self._manager)
        self._reuse = KVReuse(
            self._thread, self._llm.vllm_config, settings, self._port, self._fingerprint, str(self.rank)
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs for one prompt, as they come. Cancelling the call aborts the request in the engine."""
        plan = await self._port.plan(request.block_hashes) if self._port and request.block_hashes else None
        params = request.sampling_params
        # Whatever a client put there must not reach the connector: a plan comes from the manager only.
        transfer = {"kv_transfer_params": {PLAN: plan}} if plan else {}
        kept = {k: v for k, v in (params.extra_args or {}).items() if k != "kv_transfer_params"}
        params.extra_args = {**kept, **transfer} or None
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
                yield output
        finally:
            if plan and self._port and not admitted:
                self._port.release(plan["lease_id"])
            if self._llm.errored:
                self._end_soon()

    async def metrics(self, call: PinnedCall) -> str:
        """This process's Prometheus text: vLLM's own metrics and the transfer counters."""
        from deployments.replica_metrics import replica_metrics_text

        del call
        rank = str(self.rank)
        if self._reuse is None:
            return await asyncio.to_thread(replica_metrics_text, rank)
        pool = await asyncio.wrap_future(self._reuse.pool_usage())
        return await asyncio.to_thread(replica_metrics_text, rank, self._port, self._reuse.transfer, pool)

    def check_health(self) -> None:
        """Serve replaces the replica when this raises: the engine is dead."""
        if self._llm.errored:
            self._end_soon()
            raise RuntimeError(f"the engine of replica {self.rank} is dead: {self._thread.error!r}")

    def _end_soon(self) -> None:
        """The engine is dead: end the process, so that routers know at once and Serve starts another replica.

        Until then the replica would fail every request quickly and look idle, hence attractive.
        """
        if not self._ending:
            self._ending = True
            logger.error("the engine of replica %d is dead, and the replica ends: %r", self.rank, self._thread.error)
            threading.Timer(LAST_WORDS_S, os._exit, (1,)).start()

    def __del__(self) -> None:
        """Serve calls this after it has drained the replica's requests."""
        if self._orders:
            self._orders.cancel()
        if self._reuse:
            self._reuse.close()
        if self._port:
            self._port.close()
        self._llm.shutdown()

    async def _obey(self) -> None:
        """Register with the manager, again with every new one, and carry out its orders."""
        manager = self._manager
        while True:
            try:
                orders = await manager.ask(
                    "take_orders", self._name, ORDERS_WAIT_S, timeout_s=ORDERS_WAIT_S + MANAGER_ANSWER_S
                )
                if orders is None:
                    hashes = await asyncio.wrap_future(self._reuse.device_hashes()) if self._reuse else []
                    await manager.ask(
                        "register_replica",
                        self._name,
                        self.rank,
                        self._node_id,
                        hashes,
                        self._fingerprint,
                        timeout_s=MANAGER_ANSWER_S,
                    )
                    continue
                for order in orders:
                    await self._carry_out(order)
            except ManagerUnavailableError:
                await asyncio.sleep(MANAGER_RETRY_S)
            except Exception:
                logger.exception("an order of the KV manager failed")
                await asyncio.sleep(MANAGER_RETRY_S)

    async def _carry_out(self, order: dict[str, Any]) -> None:
        if order["kind"] != "clear_device":
            raise ValueError(f"unknown order {order['kind']!r}")
        result = 0
        if self._reuse and self._port:
            result = await asyncio.wrap_future(self._reuse.clear_device())
            await asyncio.to_thread(self._port.flush)
        await self._manager.ask("acknowledge", order["id"], result, timeout_s=MANAGER_ANSWER_S)
