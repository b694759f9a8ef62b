"""Every step of an engine timed, and the next one's budget set: `watch_steps` wraps a scheduler's two calls.

A step begins where it is planned and ends where its output has been counted; the time until the next one, while a
request decodes, is *between* steps: calls, directives, slices of other work.

Leans on vLLM's `Scheduler`: `schedule`, `update_from_output`, `running`, `max_num_scheduled_tokens`, which each
`schedule` reads again (buffers are sized by `max_num_batched_tokens`, which stays), `scheduler_config`, `block_size`;
`SchedulerOutput.num_scheduled_tokens`, `scheduled_new_reqs`, `scheduled_cached_reqs`, `has_sync_kv_loads`;
`Request.is_prefill_chunk`, `num_computed_tokens`. On the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from deployments.engine.scheduling.options import SchedulingOptions
from kvmanager.scheduling.step_budget import StepBudget
from kvmanager.scheduling.step_time import Step, StepTime

logger = logging.getLogger(__name__)

LONGEST_BETWEEN_S = 1.0
"""What passes while an engine is idle is not between two steps."""
SLICE_SHARE = 0.5
"""Of the target, for a slice of other work between two steps."""


class StepWatch:
    """See the module's docstring."""

    def __init__(
        self,
        scheduler: Any,
        step_time: StepTime,
        budget: StepBudget | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.time = step_time
        self.budget = budget
        self.failures = 0
        """Steps of which the budget could not be found, and which were as long as ever."""
        self.budget_tokens = scheduler.max_num_scheduled_tokens
        """Of the last step."""
        self._scheduler = scheduler
        self._ceiling = scheduler.max_num_scheduled_tokens
        self._clock = clock
        self._step = Step()
        self._began = 0.0
        self._ended: float | None = None
        self._warned = False

    def watch(self) -> None:
        """From now on. Before anybody else wraps `schedule`: it is timed without them."""
        schedule, update = self._scheduler.schedule, self._scheduler.update_from_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            self._began = self._clock()
            self._fenced(self._before)
            planned = schedule(*args, **kwargs)
            self._step = Step()
            self._fenced(lambda: self._planned(planned))
            return planned

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            self._fenced(self._after)
            return outputs

        self._scheduler.schedule, self._scheduler.update_from_output = timed_schedule, timed_update

    @property
    def somebody_decodes(self) -> bool:
        """Whether a request waits for its next token."""
        return any(not request.is_prefill_chunk for request in self._scheduler.running)

    def slice_s(self) -> float | None:
        """What a slice of something else may take between two steps; None: as long as it likes."""
        if self.budget is None or not self.somebody_decodes:
            return None
        return SLICE_SHARE * self.budget.target_s

    def _before(self) -> None:
        budget = self.budget
        if budget is None:
            return
        decodes = context = prefill_context = 0
        prefilled_first = None
        for request in self._scheduler.running:
            if not request.is_prefill_chunk:
                decodes += 1
                context += request.num_computed_tokens
            elif prefilled_first is None:
                prefilled_first = request
                prefill_context = request.num_computed_tokens
        if self._ended is not None and decodes and self._began - self._ended < LONGEST_BETWEEN_S:
            budget.passed_between(self._began - self._ended)
        tokens = budget.tokens(decodes, context, prefill_context)
        self.budget_tokens = self._scheduler.max_num_scheduled_tokens = min(self._ceiling, max(1, tokens))
        if budget.reachable is False and not self._warned:
            self._warned = True
            logger.warning(
                "engine.tpot_target_s: %.4g s cannot be kept: a step that only decodes takes %.4g s here; "
                "prompts are prefilled a block a step",
                budget.target_s, self.time.decodes_s(1, 0),
            )  # fmt: skip

    def _planned(self, planned: Any) -> None:
        tokens, running = planned.num_scheduled_tokens, planned.scheduled_cached_reqs
        step = Step()
        if planned.has_sync_kv_loads:
            return  # it waits for bytes, too: that is not what computing takes
        for new in planned.scheduled_new_reqs:
            step = step.plus(tokens[new.req_id], new.num_computed_tokens)
        for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            step = step.plus(tokens[request_id], computed)
        self._step = step

    def _after(self) -> None:
        now = self._clock()
        self._ended = now
        if self._step == Step():
            return
        if self.budget is not None:
            self.budget.took(self._step, now - self._began)
        self.time.took(self._step, now - self._began, now)

    def _fenced(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            self.failures += 1
            self._scheduler.max_num_scheduled_tokens = self._ceiling
            if self.failures == 1:
                logger.exception("the step budget failed; such steps are as long as vLLM's own (logged once)")


def watch_steps(scheduler: Any) -> StepWatch | None:
    """Time an engine's steps, where its configuration asks for what needs it. On the engine thread, before a step."""
    options = SchedulingOptions.read(scheduler.vllm_config)
    if options == SchedulingOptions():
        return None
    step_time = getattr(scheduler, "step_time", None) or StepTime()
    budget = None
    if options.tpot_target_s is not None:
        ceiling = scheduler.max_num_scheduled_tokens
        budget = StepBudget(options.tpot_target_s, ceiling, scheduler.block_size, step_time)
    watch = StepWatch(scheduler, step_time, budget)
    watch.watch()
    scheduler.crosskv_steps = watch
    target = "no target" if budget is None else f"{budget.target_s:g} s from token to token"
    logger.info("scheduling: %s, %s", options.policy, target)
    return watch


def steps_of(scheduler: Any) -> StepWatch | None:
    """What `watch_steps` has put there."""
    watch: StepWatch | None = getattr(scheduler, "crosskv_steps", None)
    return watch
