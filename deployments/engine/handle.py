"""A replica's handle on its engine: all calls to it, and all that it answers and reports.

The engine is a thread of this process or a process of its own (`engine.process`). Whatever crosses the handle is a
message: arguments, answers, outputs and errors can be pickled, and the replica holds no object of the engine's;
`tests/deployments/engine/test_handle.py` sends all through pickle. The port is the handle's too. An engine's process
has one of its own, for its connector and all that is in order with what the engine reports; this one plans.

Methods belong to the replica's event loop; `on_death` is called from any thread, once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.exceptions import RetryableRequestError
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.adapters import load_adapters
from deployments.engine.crash_report import EngineDiedError
from deployments.engine.engine_args import engine_config
from deployments.engine.heartbeat import HangWatch
from deployments.engine.host import EngineHungError, EngineThread, start_engine
from deployments.engine.metrics import sharing_family, vllm_families, vllm_pressure
from deployments.engine.model_identity import model_identity, weights_identity, why_apart
from deployments.engine.process.core import EngineSpec
from deployments.engine.process.front import EngineProcess, RemoteService, start_engine_process
from deployments.engine.process.service import ReuseService
from deployments.engine.resume.crossing import with_resumed
from deployments.engine.scheduling.metrics import scheduling_families
from deployments.engine.wiring import KVReuse, why_not_moved
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.engine_hints import NO_HINTS, EngineHints
from deployments.protocol.wire import GenerateRequest
from kvmanager.moves.directives import Clear, DirectiveOrder, DirectiveResult, Outcome
from kvmanager.moves.plan import Plan, PlanQuery
from kvmanager.scheduling.rebalancing import KVReport
from kvmanager.segments.keys import EXACT, AdapterName

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from configs.settings import Settings
    from deployments.port.cluster_port import ClusterPort
    from kvmanager.loading.load_rates import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A prompt for the engine: what the ingress sent, the manager's plan, and when it arrived at the ingress.

    `arrived` is on `time.monotonic`'s clock of this machine.
    """

    request: GenerateRequest
    plan: Plan | None
    arrived: float
    short_tokens: int = 0
    """Prompts below this length are not worth a load (`kvmanager.loading.short_prompts`); 0: not known."""
    salt: str | None = None
    """In the place of the request's own, where an extension's KV has names of its own; None: the request's."""


class EngineHandle:
    """See the module's docstring. Building it loads the model, and blocks meanwhile."""

    def __init__(
        self,
        settings: Settings,
        replica: str,
        rank: int,
        node_id: str,
        open_port: Callable[[], ClusterPort],
        on_death: Callable[[str], None],
        open_port_there: Callable[[], ClusterPort] | None = None,
    ) -> None:
        """`replica`: its unique name; `open_port` is called if this engine shares KV; `on_death` hears "hung".

        `open_port_there` can be pickled, and is called in an engine's process.

        Raises whatever vLLM raises for a configuration that it refuses, and RuntimeError when the model's files changed
        while they were loaded.
        """
        self._replica = replica
        self._node_id = node_id
        self._on_death = on_death
        self._named: list[str] | None = None
        self._judged = False
        self._begun: dict[str, bool] = {}
        self._port: ClusterPort | None = None
        self._names_requests = settings.http.log_format == "json"
        self._service: ReuseService | RemoteService | None = None
        config = engine_config(settings)
        identity = model_identity(config, settings)
        self.fingerprint = identity.fingerprint()
        self.apart = why_apart(settings)
        """Why this replica shares no KV, where the settings and the model's files do not say so; None: they do, or it
        shares KV."""
        self._adapters: Mapping[AdapterName, LoRARequest]
        """What a request brings to the engine for each adapter that it has."""
        self._llm: AsyncLLM
        self._engine: EngineThread | EngineProcess
        why: str | None = None
        self._terms: Mapping[str, Any] = {}
        if settings.engine_process == "process":
            spec = EngineSpec(settings, str(rank), self.fingerprint, open_port_there)
            self._llm, self._engine, ready = start_engine_process(config, spec)
            why, self._terms, self._adapters = ready.why_not_shared, ready.terms, ready.adapters
        else:
            self._llm, self._engine = start_engine(config)
            load = functools.partial(load_adapters, self._engine.core, settings)
            self._adapters = self._engine.call(load).result()
            if config.kv_transfer_config is not None:
                why = why_not_moved(self._engine, config, settings)
        if weights_identity(config) != identity.weights:
            raise RuntimeError(f"the files of model {settings.model} changed while they were loaded; start again")
        if why is not None:
            self.apart = why
            logger.warning("KV is not shared, this replica keeps its own prefix cache only: %s", why)
        elif config.kv_transfer_config is not None:
            self._port = open_port()
            if isinstance(self._engine, EngineProcess):
                self._service = RemoteService(self._engine.asker, self._port)
            else:
                reuse = KVReuse(self._engine, config, settings, self._port, self.fingerprint, str(rank))
                self._service = ReuseService(reuse, self._port)
                self._terms = reuse.terms
        self._watch = HangWatch(self._engine.beat, settings.engine.hang_s, self._give_up)
        self._watch.start()

    # Prompts.

    @property
    def shares_kv(self) -> bool:
        """Whether there is anything to plan for, and to tell the manager."""
        return self._port is not None

    @property
    def facts(self) -> EngineFacts:
        """What the manager hears when the replica registers."""
        return EngineFacts(self.fingerprint, self.apart or "")

    @property
    def terms(self) -> Mapping[str, Any]:
        """What the engine's load paths say for plans, by their names; the log says why one says nothing."""
        return self._terms

    async def plan(self, query: PlanQuery) -> Plan | None:
        """The manager's plan for a prompt (`ClusterPort.plan`); None without an answer."""
        return await self._port.plan(query) if self._port is not None else None

    async def generate(self, prompt: EnginePrompt) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs, without the prompt's tokens. Closing the iterator aborts the request in the engine.

        A plan's lease is given back, by the engine that loads or here if it never took the request. Raises
        EngineDiedError with those that may have ended the engine, RetryableRequestError for an adapter that this
        replica could not load.
        """
        request, plan = prompt.request, prompt.plan
        params = request.sampling_params
        salt = request.cache_salt if prompt.salt is None else prompt.salt
        hints = EngineHints(
            plan=plan,
            tenant=request.tenant,
            fidelity=request.fidelity,
            arrived=prompt.arrived if request.fidelity != EXACT else None,
            short_tokens=prompt.short_tokens,
            plain_salt=request.cache_salt if prompt.salt is not None else None,
            save_answer=request.save_answer,
            predicted_tokens=request.predicted_tokens,
            client_request=request.client_request_id if self._port and self._names_requests else "",
        )
        # Whatever a client put there must not reach the connector: a plan comes from the manager only.
        kept = {k: v for k, v in (params.extra_args or {}).items() if k != "kv_transfer_params"}
        kept = with_resumed(kept, request.resumed_tokens)
        transfer = {} if hints == NO_HINTS else {"kv_transfer_params": hints.as_transfer()}
        params.extra_args = {**kept, **transfer} or None
        admitted = False
        self._begun[request.request_id] = False
        try:
            adapter = self._adapter(request)
            async for output in self._llm.generate(
                {"type": "token", "prompt_token_ids": request.prompt_token_ids, "cache_salt": salt},
                params,
                request.request_id,
                lora_request=adapter,
                priority=request.priority,
                reasoning_ended=request.reasoning_ended,
                reasoning_parser_kwargs=request.reasoning_parser_kwargs,
                trace_headers=request.trace_headers or None,
            ):
                self._begun[request.request_id] = admitted = True
                output.prompt_token_ids = None
                yield output
        except EngineDeadError:
            raise EngineDiedError(self.suspects()) from None
        finally:
            self._begun.pop(request.request_id, None)
            if plan and self._port and not admitted:
                self._port.release(plan.lease_id)

    def _adapter(self, request: GenerateRequest) -> LoRARequest | None:
        if request.adapter is None:
            return None
        adapter = self._adapters.get(request.adapter)
        if adapter is None:
            raise RetryableRequestError(
                f"Adapter `{request.adapter.name}` is not served by this replica: its files have changed since the "
                "server was started."
            )
        return adapter

    @property
    def ongoing(self) -> int:
        """Prompts that the engine has, or is about to get."""
        return len(self._begun)

    @property
    def waiting(self) -> int:
        """Of these, those without an output yet."""
        return sum(not begun for begun in self._begun.values())

    async def kv_pressure(self) -> float | None:
        """Share of the device pool that running requests hold, as of the engine's last step; None: not known.

        Cached blocks that no request holds are free. Without KV reuse it is vLLM's own figure, if vLLM counts.
        """
        if self._service is None:
            return vllm_pressure()
        usage = await self._service.usage()
        blocks = usage["blocks"] - 1  # vLLM keeps one for itself, the null block
        return 1.0 - usage["free_blocks"] / blocks if blocks > 0 else None

    async def kv_report(self) -> KVReport | None:
        """Return the device pool's usage, for moving streams; None without KV reuse: a move would recompute all."""
        if self._service is None:
            return None
        usage = await self._service.usage()
        blocks = usage["blocks"] - 1  # vLLM's null block
        return KVReport(time.monotonic(), blocks, blocks - usage["free_blocks"], usage["wanted_blocks"])

    async def saved(self, within_s: float) -> bool:
        """Wait up to `within_s` for the saves started by now; return whether all have ended."""
        return self._service is not None and await self._service.saved(within_s)

    def report_rate(self, sample: Sample) -> None:
        """Report a prefill's time, as a replica saw it. Returns at once."""
        if self._port is not None:
            self._port.report_rate(sample)

    # Life.

    @property
    def dead(self) -> str | None:
        """The error that ended the engine, in words; None while it lives."""
        return repr(self._engine.error) if self._llm.errored else None

    def suspects(self) -> list[str] | None:
        """Requests that may have ended the engine, None without a crash report; every caller gets the same answer."""
        if not self._judged:
            self._judged = True
            books = list(self._begun.items())
            not_begun, begun = ([name for name, has in books if has == wanted] for wanted in (False, True))
            self._named = self._engine.suspects(not_begun, begun)
            said = "no crash report" if self._named is None else ", ".join(self._named) or "no request"
            logger.error("suspects of the engine's death: %s", said)
        return self._named

    def close(self) -> None:
        """End the engine, its transfers and its port."""
        self._watch.close()
        if self._service:
            self._service.close()
        self._llm.shutdown()

    # The manager.

    async def register(self, rank: int) -> None:
        """Introduce the replica to the manager with what its device holds, in order with the changes reported."""
        if self._service is None:
            raise ValueError("an engine without KV reuse has nothing to register")
        await self._service.register(self._replica, rank, self._node_id, self.facts)

    async def needs_resync(self) -> bool:
        """Whether the manager was not told of some change of the device, so that the replica must register again."""
        return self._service is not None and await self._service.needs_resync()

    async def carry_out(self, order: DirectiveOrder) -> DirectiveResult:
        """Carry out one directive of the manager. By then the manager has been told what is on the device."""
        if self._service is None:
            return DirectiveResult(Outcome.DONE if isinstance(order.directive, Clear) else Outcome.REFUSED_GONE)
        return await self._service.carry_out(order)

    async def look_after_tier(self) -> None:
        """See to it that the node has a CPU tier (`ClusterPort.look_after_tier`)."""
        if self._service is not None:
            await self._service.look_after_tier()

    async def metrics(self) -> list[Metric]:
        """Families of the engine and the port. Does not wait for the engine: the pool is as of its last step."""
        own = await asyncio.to_thread(lambda: [*vllm_families(), sharing_family(self.shares_kv)])
        if self._service is None and isinstance(self._engine, EngineThread):
            own += scheduling_families(self._engine.scheduler)
        return [*own, *(await self._service.families() if self._service else ())]

    def _give_up(self, why: str) -> None:
        """The engine hangs: its requests end at once, to be tried elsewhere. On the watch's thread."""
        self._engine.give_up(EngineHungError(why))
        self._on_death("hung")
