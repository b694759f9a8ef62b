"""A replica's plans, prompt by prompt: which are asked for, what became of them, what the engine measured meanwhile.

Why a prompt's KV was loaded or computed travels to the client as `usage.kv_cache.reason`: the plan's
`kvmanager.moves.plan.PlanReason`, or one of the reasons below, which are the replica's own. On the replica's event
loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from deployments.protocol.engine_hints import extra
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest, KVCacheUsage
from kvmanager.loading.blend_choice import BlendSpan, blend_of
from kvmanager.loading.load_rates import Sample
from kvmanager.loading.short_prompts import ShortPrompts
from kvmanager.moves.chunks import BLEND, BlendQuery, BlendTerms, ChunkQuery, PlannedBlend
from kvmanager.moves.plan import NOTHING_EXPECTED, Plan, PlanQuery
from kvmanager.moves.retained_prefixes import SPARSE, PlannedSparse
from kvmanager.scaling.prefill_rate import PrefillRate
from kvmanager.segments.keys import TOLERANT

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from kvmanager.segments.budgets import Budgets
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


def blend_query(request: GenerateRequest, terms: BlendTerms | None, block_tokens: int) -> BlendQuery | None:
    """What to ask of a prompt's chunks; None where nothing can be blended.

    Chunks without a full block are left out, and those that are not what they say: so there are at most as many hashes
    as the prompt has blocks, however many chunks a client makes of it. O(chunks).
    """
    wanted = request.blend
    if wanted is None or terms is None or not 0.0 <= wanted.recompute_ratio <= 1.0:
        return None
    chunks, end = [], 0
    for chunk in wanted.chunks:
        stop = chunk.start_token + chunk.tokens
        fits = end <= chunk.start_token < stop <= len(request.prompt_token_ids)
        if fits and 0 < len(chunk.block_hashes) <= chunk.tokens // block_tokens:
            hashes = cast("Sequence[BlockHash]", chunk.block_hashes)
            chunks.append(ChunkQuery(chunk.start_token, chunk.tokens, hashes))
            end = stop
    return BlendQuery(chunks, wanted.recompute_ratio, terms) if chunks else None


def _planned_blend(
    plan: Plan | None, start: int, prompt_tokens: int, block_tokens: int, terms: BlendTerms | None
) -> BlendSpan | None:
    """What a plan blends behind a prompt's first `start` tokens; None for nothing."""
    planned = extra(plan, BLEND, PlannedBlend)
    if planned is None or terms is None:
        return None
    stored = [(chunk.start_token, chunk.blocks * block_tokens) for chunk in planned.chunks]
    return blend_of(stored, range(start, prompt_tokens), block_tokens, planned.ratio, terms)


class PlanSource(Protocol):
    """Asks the manager, and reports to it: `deployments.engine.handle.EngineHandle`."""

    @property
    def blend_terms(self) -> BlendTerms | None:
        """How the engine blends; None: not at all."""
        ...

    @property
    def sparse_budgets(self) -> Budgets | None:
        """Of what the engine presents sparse; None: it takes dense KV only."""
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
        sparse = extra(plan, SPARSE, PlannedSparse)
        loads = sparse.loads if sparse else plan.segments if plan else ()
        last = loads[-1] if loads else None
        self._is_sparse = sparse is not None
        self._planned_tokens = min(whole, last.end_block * block_tokens) if last else 0
        start = max(self._planned_tokens, min(whole, self._expected.device_tokens))
        self._blend = _planned_blend(plan, start, self._prompt_tokens, block_tokens, plans.blend_terms)
        self._queued = self._prompt_tokens - start
        if self._blend is not None:  # a part of its tokens is computed
            self._queued -= int((self._blend.end - start) * (1.0 - self._blend.share))
        plans.queued_tokens += self._queued

    def begun(self) -> None:
        """The first output is there, or none will come. May be called again."""
        self._plans.queued_tokens -= self._queued
        self._queued = 0

    def give_reason(self, usage: KVCacheUsage) -> None:
        """Add the reason for the amount reused to the usage."""
        reused = usage["device"] + usage["cpu"] + usage["redis"]
        if reused - usage.get("blended", 0) < self._planned_tokens or self._is_unblended(usage):
            self._reason = LOAD_FAILED
        usage["reason"] = self._reason

    def ended(self, output: RequestOutput) -> None:
        """Complete the usage in the last output, and report what the engine measured."""
        usage: KVCacheUsage | None = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)
        times: Any = output.metrics  # None without engine.log_stats; its times are the engine's clock
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
        # What came from a CPU tier may have come layer by layer, while the rest was computed; and what a blend computes
        # is no part of the engine's steps; and to attend to a sparse prefix takes less time.
        if (
            times is not None
            and self._blend is None
            and not self._is_sparse
            and not usage["cpu"]
            and usage["recomputed"] >= self._plans.block_tokens
        ):
            tokens, context = usage["recomputed"], usage["device"] + loaded
            self._plans.report_prefill(tokens, times.first_token_ts - times.scheduled_ts, context)

    def _is_unblended(self, usage: KVCacheUsage) -> bool:
        """Whether nothing was blended of what was planned, although the device did not have it by then.

        A blend that recomputes all of its tokens reuses none.
        """
        blend = self._blend
        if blend is None or "blended" in usage or blend.ratio >= 1.0:
            return False
        return usage["device"] < blend.end


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

    @property
    def blend_terms(self) -> BlendTerms | None:
        """How the engine blends; None: not at all."""
        return self._source.blend_terms if self._source is not None else None

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
        extras: dict[str, Any] = {}
        if blend := blend_query(request, self.blend_terms, self.block_tokens):
            extras[BLEND] = blend
        if request.fidelity == TOLERANT and (budgets := self._source.sparse_budgets) is not None:
            extras[SPARSE] = budgets
        query = PlanQuery(hashes, exact, prompt_tokens, self.queued_tokens, extras=extras)
        plan = await self._source.plan(query)
        if plan is None:
            return PromptPlan(self, request, None, NO_PLAN)
        self._short.heard(time.monotonic(), plan.expected.short_tokens)
        return PromptPlan(self, request, plan, plan.reason.value)

    def report_prefill(self, tokens: int, seconds: float, context: int) -> None:
        """How long the engine took to compute what was not reused of a prompt."""
        self.rate.computed(tokens, seconds)
        if self._source is not None:
            self._source.report_rate(("prefill", tokens, seconds, context))
