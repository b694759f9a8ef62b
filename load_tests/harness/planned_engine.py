"""An engine whose prompts are planned as a replica plans them: by measured rates, and with a reason for each."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from configs.settings import Settings
from deployments.manager.actor import PromptPlanner
from deployments.manager.config import load_choice, manager_config
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.wire import GenerateRequest
from deployments.replica.prompt_plans import PlanSource, PromptPlans
from kvmanager.extensions import plan_extensions
from kvmanager.extensions.states.landings import STATES
from kvmanager.moves.plan import Plan, PlanQuery
from kvmanager.segments.keys import EXACT, Fidelity
from load_tests.harness.engine import Engine
from load_tests.harness.memory_port import HERE, REPLICA, BrainPort

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


class RatedPort(BrainPort):
    """A `BrainPort` that loads what is worth it by measured rates, as the manager's process decides."""

    def __init__(self, settings: Settings) -> None:
        config = manager_config(settings)
        self._loads = load_choice(config)
        extensions = plan_extensions(config.extensions, self._loads)
        super().__init__(config.blocks_per_segment, extensions, config.block_tokens)
        self._planner = PromptPlanner(self.brain, self._loads)

    def plan_query(self, query: PlanQuery) -> Plan:
        """Return the manager's answer to a replica's query."""
        with self.lock:
            return self._planner.plan(time.monotonic(), REPLICA, HERE.holder, query)

    def report_rate(self, sample: Any) -> None:
        """See `KVPort`."""
        with self.lock:
            self._loads.report(time.monotonic(), REPLICA, [sample])

    def release(self, lease_id: int) -> None:
        """See `KVPort`."""
        with self.lock:
            self._planner.release([lease_id])


class PlannedEngine(Engine):
    """Use on one event loop. `plan_by` comes before the first prompt."""

    fidelity: Fidelity = EXACT
    _plans: PromptPlans

    def plan_by(self, source: PlanSource) -> None:
        """Ask `source` for plans from now on."""
        self._plans = PromptPlans(source, self.block_tokens)

    def stream(
        self, tokens: Sequence[int], params: SamplingParams, last_message: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """As `deployments.replica.replica.Replica.generate`. `last_message`: where it begins; 0: not known."""
        hashes: list[Any] = list(self.hashes(tokens))  # the ingress hashes them, in another process
        request = GenerateRequest(f"plan-{next(self._ids)}", list(tokens), params, self.salt, hashes)
        return self._planned(replace(request, fidelity=self.fidelity, extras={STATES: last_message}))

    async def _planned(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        planned = await self._plans.ask(request)
        hints = EngineHints(planned.plan, fidelity=self.fidelity, short_tokens=planned.short_tokens)
        salt = request.cache_salt
        if planned.salt is not None:  # as `deployments.engine.handle`
            hints, salt = replace(hints, plain_salt=salt), planned.salt
        async for output in self.generate(request.prompt_token_ids, request.sampling_params, hints, salt):
            planned.begun()
            if output.finished:
                planned.ended(output)
            yield output


class RatedEngine(PlannedEngine):
    """Has a `RatedPort`, so manager and tier are in this process."""

    def __init__(self, settings: Settings) -> None:
        self._rated = RatedPort(settings)
        super().__init__(settings, self._rated)
        self.plan_by(_RatedSource(self._rated, self.reuse.terms))

    async def forget(self) -> None:
        """Empty the device and the tier; what was measured of both stays."""
        await self.empty_device()
        self._rated.lose_all()


class _RatedSource:
    """A `PlanSource` for an engine with these `terms`."""

    def __init__(self, port: RatedPort, terms: dict[str, Any]) -> None:
        self._port, self.terms = port, terms
        self.report_rate = port.report_rate

    async def plan(self, query: PlanQuery) -> Plan | None:
        """See `PlanSource`."""
        return self._port.plan_query(query)
