"""A replica's plans, prompt by prompt: which are asked for, what became of them, what the engine measured meanwhile.

Why a prompt's KV was loaded or computed travels to the client as `usage.kv_cache.reason`: the plan's
`kvmanager.moves.plans.PlanReason`, or one of the reasons below, which are the replica's own. On the replica's event
loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from deployments.protocol.kv_port import PlanDict, PlanExpectation
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest, KVCacheUsage
from kvmanager.loading.load_rates import Sample
from kvmanager.loading.short_prompts import ShortPrompts

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


logger = logging.getLogger(__name__)

SHORT = "short"
"""The prompt was not planned: computing it is faster than loading anything, or it is shorter than a block."""
NO_PLAN = "no_plan"
"""The manager did not answer."""
COMPUTED_WHOLE = "computed_whole"
"""The request asks for something that only computing all of its prompt gives, such as the prompt's logprobs."""
LOAD_FAILED = "load_failed"
"""Not all that was planned came, or not in time."""

_NOTHING_EXPECTED = PlanExpectation(load_s=0.0, recompute_s=0.0, deadline_s=0.0, device_tokens=0, short_tokens=0)


class PlanSource(Protocol):
    """Who asks the manager, and tells it: `deployments.engine.room.EngineRoom`."""

    async def plan(
        self, hashes: Sequence[bytes], exact_hashes: Sequence[bytes], prompt_tokens: int, queued_tokens: int
    ) -> PlanDict | None:
        """The manager's plan for a prompt; None without an answer in time."""
        ...

    def report_rate(self, sample: Sample) -> None:
        """How long a prefill took. Returns at once."""
        ...


class PromptPlan:
    """One prompt's plan. Counts as queued, with the tokens to compute, from its plan to its first output."""

    def __init__(self, plans: PromptPlans, request: GenerateRequest, plan: PlanDict | None, reason: str) -> None:
        self.plan = plan
        self.short_tokens = plans.short_tokens
        self._plans = plans
        self._request_id = request.request_id
        self._prompt_tokens = len(request.prompt_token_ids)
        self._reason = reason
        self._expected = plan.get("expected", _NOTHING_EXPECTED) if plan else _NOTHING_EXPECTED
        block_tokens = plans.block_tokens
        whole = (self._prompt_tokens - 1) // block_tokens * block_tokens
        last = plan["segments"][-1] if plan and plan["segments"] else None
        self._planned_tokens = min(whole, last.end_block * block_tokens) if last else 0
        self._queued = self._prompt_tokens - max(self._planned_tokens, min(whole, self._expected["device_tokens"]))
        plans.queued_tokens += self._queued

    def begun(self) -> None:
        """The first output is there, or none will come. May be called again."""
        self._plans.queued_tokens -= self._queued
        self._queued = 0

    def ended(self, output: RequestOutput) -> None:
        """Complete the usage in the last output, and report what the engine measured."""
        usage: KVCacheUsage | None = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)
        if usage is None:
            return
        loaded = usage["cpu"] + usage["redis"]
        if usage["device"] + loaded < self._planned_tokens:
            self._reason = LOAD_FAILED
        usage["reason"] = self._reason
        logger.debug(
            "%s: %s; tokens: %d device, %d cpu, %d redis, %d recomputed; expected until the first token: %.1f ms with "
            "the plan, %.1f ms without",
            self._request_id, self._reason, usage["device"], usage["cpu"], usage["redis"], usage["recomputed"],
            1e3 * self._expected["load_s"], 1e3 * self._expected["recompute_s"],
        )  # fmt: skip
        times: Any = output.metrics  # None without engine.log_stats; its times are the engine's clock
        # What came from a CPU tier may have come layer by layer, while the rest was computed.
        if times is not None and not usage["cpu"] and usage["recomputed"] >= self._plans.block_tokens:
            seconds = times.first_token_ts - times.scheduled_ts
            self._plans.report_prefill(usage["recomputed"], seconds, usage["device"] + loaded)


class PromptPlans:
    """See the module's docstring. Without a `source` nothing is planned, and prompts have no reason."""

    def __init__(self, source: PlanSource | None, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.queued_tokens = 0
        """What the engine has to compute before the next prompt's turn comes, about."""
        self._source = source
        self._short = ShortPrompts()

    @property
    def short_tokens(self) -> int:
        """Below so many tokens nothing is worth a load, as the manager said last; 0: it does not know."""
        return self._short.below_tokens

    async def ask(self, request: GenerateRequest) -> PromptPlan:
        """The plan for a prompt, if it is worth one and the manager answers in time."""
        if self._source is None:
            return PromptPlan(self, request, None, "")
        if request.sampling_params.skip_reading_prefix_cache:
            return PromptPlan(self, request, None, COMPUTED_WHOLE)
        prompt_tokens = len(request.prompt_token_ids)
        if not request.block_hashes or self._short.skips(time.monotonic(), prompt_tokens):
            return PromptPlan(self, request, None, SHORT)
        plan = await self._source.plan(
            request.block_hashes, request.exact_block_hashes, prompt_tokens, self.queued_tokens
        )
        if plan is None:
            return PromptPlan(self, request, None, NO_PLAN)
        self._short.heard(time.monotonic(), plan.get("expected", _NOTHING_EXPECTED)["short_tokens"])
        return PromptPlan(self, request, plan, plan.get("reason", ""))

    def report_prefill(self, tokens: int, seconds: float, context: int) -> None:
        """How long the engine took to compute what was not reused of a prompt."""
        if self._source is not None:
            self._source.report_rate(("prefill", tokens, seconds, context))
