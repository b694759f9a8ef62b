"""A replica's plans, prompt by prompt: which are asked for, what became of them, what the engine measured meanwhile.

Why a prompt's KV was loaded or computed travels to the client as `usage.kv_cache.reason`: the plan's
`kvmanager.moves.plan.PlanReason`, or one of the reasons below, which are the replica's own. On the replica's event
loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest, KVCacheUsage
from deployments.replica.extensions import asked_extensions
from deployments.replica.plan_extension import EngineTerms, PlannedExtra, ReplicaExtension
from kvmanager.loading.load_rates import Sample
from kvmanager.loading.short_prompts import ShortPrompts
from kvmanager.moves.plan import LANDINGS, NOTHING_EXPECTED, Plan, PlanQuery
from kvmanager.scaling.demand import PrefillRate

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from kvmanager.segments.keys import BlockHash

logger = logging.getLogger(__name__)

SHORT = "short"
"""The prompt was not planned: computing it is faster than loading anything, or it is shorter than a block."""
NO_PLAN = "no_plan"
"""The manager did not answer."""
COMPUTED_WHOLE = "computed_whole"
"""The request asks for something that only computing all of its prompt gives, such as the prompt's logprobs."""
LOAD_FAILED = "load_failed"
"""Not all that was planned came, or not in time."""


class PlanSource(Protocol):
    """Asks the manager, and reports to it: `deployments.engine.handle.EngineHandle`."""

    @property
    def terms(self) -> Mapping[str, Any]:
        """What the engine's load paths say for plans, by their names; without one its extension asks for nothing."""
        ...

    async def plan(self, query: PlanQuery) -> Plan | None:
        """The manager's plan for a prompt; None without an answer in time."""
        ...

    def report_rate(self, sample: Sample) -> None:
        """Report the time of a prefill. Returns at once."""
        ...


class PromptPlan:
    """One prompt's plan. Counts as queued, with the tokens to compute, from its plan to its first output."""

    def __init__(self, plans: PromptPlans, request: GenerateRequest, plan: Plan | None, reason: str) -> None:
        self.plan = plan
        self.short_tokens = plans.short_tokens
        self._plans = plans
        self._request_id = request.request_id
        self._prompt_tokens = request.num_tokens
        self._reason = reason
        self._expected = plan.expected if plan else NOTHING_EXPECTED
        block_tokens = plans.block_tokens
        whole = (self._prompt_tokens - 1) // block_tokens * block_tokens
        self._extras = plans.planned_extras(request, plan)
        own = [each.loads for each in self._extras if each.loads is not None]
        loads = own[0] if own else plan.segments if plan else ()
        last = loads[-1] if loads else None
        self._planned_tokens = min(whole, last.end_block * block_tokens) if last else 0
        start = self.own_tokens = max(self._planned_tokens, min(whole, self._expected.device_tokens))
        """Length of the beginning that should come from the device or from segments stored under its own names."""
        self.salt = next((each.salt for each in self._extras if each.salt is not None), None)
        """Under which the prompt comes to the engine in the place of its own; None: its own."""
        self._queued = self._prompt_tokens - start - sum(each.saved_tokens(start) for each in self._extras)
        plans.queued_tokens += self._queued

    def begun(self) -> None:
        """The first output is there, or none will come. May be called again."""
        self._plans.queued_tokens -= self._queued
        self._queued = 0

    def give_reason(self, usage: KVCacheUsage) -> None:
        """Add the reason for the amount reused to the usage."""
        reused = usage["device"] + usage["cpu"] + usage["redis"]
        own = reused - sum(each.reused(usage) for each in self._extras)
        if own < self._planned_tokens or any(each.failed(usage) for each in self._extras):
            self._reason = LOAD_FAILED
        usage["reason"] = self._reason

    def ended(self, output: RequestOutput) -> None:
        """Complete the usage in the last output, and report what the engine measured."""
        usage: KVCacheUsage | None = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)
        times: Any = output.metrics  # its times are the engine's clock
        if usage is None:  # what vLLM's own prefix cache had is not known: a prompt took what it took
            if times is not None:
                self._plans.rate.computed(self._prompt_tokens, times.first_token_ts - times.scheduled_ts)
            return
        loaded = usage["cpu"] + usage["redis"]
        self.give_reason(usage)
        logger.debug(
            "%s: %s; tokens: %d device, %d cpu, %d redis, %d recomputed; expected until the first token: %.1f ms with "
            "the plan, %.1f ms without",
            self._request_id, self._reason, usage["device"], usage["cpu"], usage["redis"], usage["recomputed"],
            1e3 * self._expected.load_s, 1e3 * self._expected.recompute_s,
        )  # fmt: skip
        # What came from a CPU tier may have come layer by layer, while the rest was computed; and what an extension
        # brings is computed otherwise, or attended to in less time.
        if (
            times is not None
            and not self._extras
            and not usage["cpu"]
            and usage["recomputed"] >= self._plans.block_tokens
        ):
            tokens, context = usage["recomputed"], usage["device"] + loaded
            self._plans.report_prefill(tokens, times.first_token_ts - times.scheduled_ts, context)


class PromptPlans:
    """See the module's docstring. Without a `source` nothing is planned, and prompts have no reason."""

    def __init__(self, source: PlanSource | None, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.queued_tokens = 0
        """What the engine has to compute before the next prompt's turn comes, about."""
        self._source = source
        self._short = ShortPrompts()
        self.rate = PrefillRate()
        """Of this replica's own prompts."""

    @property
    def queued_s(self) -> float | None:
        """Seconds that the engine needs for `queued_tokens`; None before it has computed any prompt."""
        return self.rate.seconds(self.queued_tokens)

    @property
    def short_tokens(self) -> int:
        """Prompts with fewer tokens are not worth a load, by the manager's last answer; 0: not known."""
        return self._short.below_tokens

    def has_terms(self, extension: str) -> bool:
        """Whether an extension takes part in plans here."""
        return self._source is not None and self._source.terms.get(extension) is not None

    def planned_extras(self, request: GenerateRequest, plan: Plan | None) -> list[PlannedExtra]:
        """Return what a plan brings by extensions."""
        if plan is None or not plan.extras:
            return []
        made = (extension.planned(request, plan, engine) for _, extension, engine in self._extensions())
        return [each for each in made if each is not None]

    def _extensions(self) -> list[tuple[str, ReplicaExtension, EngineTerms]]:
        return asked_extensions(self._source.terms, self.block_tokens) if self._source is not None else []

    async def ask(self, request: GenerateRequest) -> PromptPlan:
        """The plan for a prompt, if it is worth one and the manager answers in time."""
        if self._source is None:
            return PromptPlan(self, request, None, "")
        if request.sampling_params.skip_reading_prefix_cache:
            return PromptPlan(self, request, None, COMPUTED_WHOLE)
        prompt_tokens = request.num_tokens
        if not request.block_hashes or self._short.skips(time.monotonic(), prompt_tokens):
            return PromptPlan(self, request, None, SHORT)
        hashes, exact = (cast("list[BlockHash]", each) for each in (request.block_hashes, request.exact_block_hashes))
        asked = ((name, extension.ask(request, engine)) for name, extension, engine in self._extensions())
        extras = {name: extra for name, extra in asked if extra is not None}
        lands = bool(self._source.terms.get(LANDINGS))
        query = PlanQuery(hashes, exact, prompt_tokens, self.queued_tokens, needs_landing=lands, extras=extras)
        plan = await self._source.plan(query)
        if plan is None:
            return PromptPlan(self, request, None, NO_PLAN)
        self._short.heard(time.monotonic(), plan.expected.short_tokens)
        return PromptPlan(self, request, plan, str(plan.reason))

    def report_prefill(self, tokens: int, seconds: float, context: int) -> None:
        """How long the engine took to compute what was not reused of a prompt."""
        self.rate.computed(tokens, seconds)
        if self._source is not None:
            self._source.report_rate(("prefill", tokens, seconds, context))
