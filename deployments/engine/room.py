"""The engine room's door: all that a replica says to its engine, and all that it hears of it.

The room is a process that happens to be a thread. Whatever goes through this door is a message: arguments, answers,
outputs and errors can be pickled, and nobody outside holds an object of the room's. So the room can move into a process
of its own, with this class on both sides of a pipe; `tests/deployments/engine/test_room.py` sends all through pickle.
The port is the room's too: what a replica wants of the cluster goes through it, in order with what the engine reports.

Methods belong to the replica's event loop; `on_death` is called from any thread, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.directive_runner import DirectiveRunner
from deployments.engine.engine_args import engine_config
from deployments.engine.heartbeat import HangWatch
from deployments.engine.host import EngineHungError, start_engine
from deployments.engine.metrics import (
    directive_families,
    port_families,
    sharing_family,
    transfer_families,
    vllm_families,
)
from deployments.engine.model_identity import model_identity, weights_identity
from deployments.engine.step_witness import EngineDiedError
from deployments.engine.wiring import KVReuse, why_not_moved
from deployments.protocol.kv_port import ANSWER_GOES, ARRIVED, FIDELITY, PLAN, SHORT_TOKENS, TENANT, PlanDict
from deployments.protocol.wire import GenerateRequest
from kvmanager.segments.keys import EXACT

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.outputs import RequestOutput

    from configs.settings import Settings
    from deployments.port.cluster_port import ClusterPort
    from kvmanager.loading.load_rates import Sample

logger = logging.getLogger(__name__)

NO_CACHE = {"outcome": "refused_gone"}
"""What a room without KV reuse answers to every directive."""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A prompt for the engine: what the ingress sent, the manager's plan, and when it arrived at the ingress.

    `arrived` is on `time.monotonic`'s clock of this machine.
    """

    request: GenerateRequest
    plan: PlanDict | None
    arrived: float
    short_tokens: int = 0
    """Below so many nothing is worth a load (`kvmanager.loading.short_prompts`); 0: not known."""


class EngineRoom:
    """See the module's docstring. Building it loads the model, and blocks meanwhile."""

    def __init__(
        self,
        settings: Settings,
        replica: str,
        rank: int,
        node_id: str,
        open_port: Callable[[], ClusterPort],
        on_death: Callable[[str], None],
    ) -> None:
        """`replica`: its unique name; `open_port` is called if this engine shares KV; `on_death` hears "hung".

        Raises whatever vLLM raises for a configuration that it refuses, and RuntimeError when the model's files changed
        while they were loaded.
        """
        self._replica = replica
        self._node_id = node_id
        self._on_death = on_death
        self._named: list[str] | None = None
        self._port: ClusterPort | None = None
        self._reuse: KVReuse | None = None
        self._directives: DirectiveRunner | None = None
        config = engine_config(settings)
        identity = model_identity(config, settings)
        self._llm, self._thread = start_engine(config, settings.engine.log_stats)
        if weights_identity(config) != identity.weights:
            raise RuntimeError(f"the files of model {settings.model} changed while they were loaded; start again")
        self.fingerprint = identity.fingerprint()
        why = why_not_moved(self._thread, self._llm.vllm_config) if config.kv_transfer_config is not None else None
        if why is not None:
            logger.warning("KV is not shared, this replica keeps its own prefix cache only: %s", why)
        elif config.kv_transfer_config is not None:
            self._port = open_port()
            self._reuse = KVReuse(
                self._thread,
                self._llm.vllm_config,
                settings,
                self._port,
                self.fingerprint,
                str(rank),
            )
            self._directives = DirectiveRunner(self._reuse.control, self._thread.call)
        self._watch = HangWatch(self._thread.heartbeat, settings.engine.hang_s, self._give_up)
        self._watch.start()

    # Prompts.

    @property
    def shares_kv(self) -> bool:
        """Whether there is anything to plan for, and to tell the manager."""
        return self._port is not None

    async def plan(
        self, hashes: Sequence[bytes], exact_hashes: Sequence[bytes], prompt_tokens: int, queued_tokens: int
    ) -> PlanDict | None:
        """The manager's plan for a prompt (`ClusterPort.plan`); None without an answer."""
        return await self._port.plan(hashes, exact_hashes, prompt_tokens, queued_tokens) if self._port else None

    async def generate(self, prompt: EnginePrompt) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs, without the prompt's tokens. Closing the iterator aborts the request in the engine.

        A plan's lease is given back, by the engine that loads or here if it never took the request. Raises
        EngineDiedError with those that may have ended the engine.
        """
        request, plan = prompt.request, prompt.plan
        params = request.sampling_params
        # Whatever a client put there must not reach the connector: a plan comes from the manager only.
        transfer = {
            **({PLAN: plan} if plan else {}),
            **({TENANT: request.tenant} if request.tenant else {}),
            **({SHORT_TOKENS: prompt.short_tokens} if prompt.short_tokens else {}),
            **({} if request.save_answer else {ANSWER_GOES: True}),
            **({FIDELITY: request.fidelity, ARRIVED: prompt.arrived} if request.fidelity != EXACT else {}),
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
                yield output
        except EngineDeadError:
            raise EngineDiedError(self.suspects()) from None
        finally:
            if plan and self._port and not admitted:
                self._port.release(plan["lease_id"])

    def report_rate(self, sample: Sample) -> None:
        """How long a prefill took, as a replica saw it. Returns at once."""
        if self._port is not None:
            self._port.report_rate(sample)

    # Life.

    @property
    def dead(self) -> str | None:
        """What ended the engine, in words; None while it lives."""
        return repr(self._thread.error) if self._llm.errored else None

    def suspects(self) -> list[str]:
        """Who may have ended the engine; the same answer to everybody."""
        if self._named is None:
            self._named = self._thread.witness.suspects()
            logger.error("suspects of the engine's death: %s", ", ".join(self._named) or "nobody")
        return self._named

    def close(self) -> None:
        """End the engine, its transfers and its port."""
        self._watch.close()
        if self._reuse:
            self._reuse.close()
        if self._port:
            self._port.close()
        self._llm.shutdown()

    # The manager.

    async def register(self, rank: int) -> None:
        """Introduce the replica to the manager with what its device holds, in order with the changes reported."""
        port, reuse = self._port, self._reuse
        if port is None or reuse is None:
            raise ValueError("a room without KV reuse has nothing to register")
        sent = Future[None]()

        def tell(hashes: list[bytes]) -> None:
            port.report_registration((self._replica, rank, self._node_id, hashes, self.fingerprint), sent)

        await asyncio.wrap_future(reuse.tell_device(tell))
        await asyncio.wrap_future(sent)

    @property
    def untold(self) -> bool:
        """Whether the manager was not told of some change of the device, so that the replica must register again."""
        return self._port is not None and self._port.untold

    async def carry_out(self, directive: Mapping[str, Any]) -> Any:
        """Carry out one directive of the manager; answers what `KVManagerActor.acknowledge` takes.

        By then the manager has been told what is on the device.
        """
        result: Any = NO_CACHE
        if directive["kind"] == "clear_device":
            cleared = self._reuse.clear_device(directive.get("tenant")) if self._reuse else None
            result = 0 if cleared is None else await asyncio.wrap_future(cleared)
        elif self._directives:
            result = await self._directives.carry_out(directive)
        if self._port:
            await asyncio.to_thread(self._port.flush)
        return result

    async def look_after_tier(self) -> None:
        """See to it that the node has a CPU tier (`ClusterPort.look_after_tier`)."""
        if self._port is not None:
            await asyncio.to_thread(self._port.look_after_tier)

    async def metrics(self) -> list[Metric]:
        """Families of everything in the room. Does not wait for the engine: the pool is as of its last step."""
        return await asyncio.to_thread(self._families)

    def _families(self) -> list[Metric]:
        families = [*vllm_families(), sharing_family(self.shares_kv)]
        if self._reuse and self._port and self._directives:
            families += transfer_families(self._reuse.transfer.counters, self._reuse.usage)
            families += port_families(self._port)
            families += directive_families(self._directives)
            families += self._reuse.layerwise.times.registry.collect()
        return families

    def _give_up(self, why: str) -> None:
        """The engine hangs: its requests end at once, to be tried elsewhere. On the watch's thread."""
        self._thread.give_up(EngineHungError(why))
        self._on_death("hung")
