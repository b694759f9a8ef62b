"""vLLM's scheduler with a policy of ours: `kvmanager.scheduling.policies` decides, this carries it out.

vLLM's queue is ordered by `Request.priority`, which may be a float: it holds the job's key. vLLM never preempts a
running request for a waiting one, so that is done here, before it plans a step, one a step at most.

Leans on vLLM's `Scheduler` (sync scheduling, policy "priority"): `schedule`, `add_request`, `_preempt_request`, which
frees the blocks and puts the request back, `_free_request`; `waiting`, a heap that must not see a key change,
`kv_holding_waiting`, drained first, `running`, `requests`, `finished_recving_kv_req_ids`, `_is_blocked_waiting_status`,
`_request_blocks_can_be_freed`, `max_num_active_reqs`, `num_waiting_for_streaming_input`, `prev_step_scheduled_req_ids`,
`kv_cache_manager` (`block_pool`, `get_block_ids`, `prefix_cache_lookup_enabled`), its `coordinator`
(`find_longest_cache_hit`, `single_type_managers` with their `block_size`), `connector`; of a `Request`
`num_output_tokens`, `num_tokens`, `max_tokens`, `is_prefill_chunk`, `priority`, `arrival_time`, `status`.
`tests/deployments/engine/scheduling` holds it on a live engine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from heapq import nsmallest
from typing import Any, TypeVar

from vllm.v1.request import Request, RequestStatus

from deployments.engine.pool.hidden_blocks import hide_blocks
from deployments.engine.resume.crossing import resumed_tokens
from deployments.engine.resume.scheduler import ResumingScheduler
from deployments.engine.scheduling.options import SchedulingOptions
from deployments.engine.scheduling.wanted_blocks import needed_blocks
from deployments.protocol.engine_hints import hints_of
from kvmanager.scheduling.jobs import ScheduledJob, new_job
from kvmanager.scheduling.policies import make_policy, victim_for
from kvmanager.scheduling.step_time import StepTime

logger = logging.getLogger(__name__)
T = TypeVar("T")

AGE_EVERY_S = 0.25
BY_POLICY, BY_MEMORY = "policy", "memory"
AHEAD = 2
"""Preempted requests, the next ones of the queue, whose KV is brought to the device while they wait."""


class PolicyScheduler(ResumingScheduler):
    """See the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_time = StepTime()
        self.policy_in_force = make_policy(SchedulingOptions.read(self.vllm_config).policy, self.step_time)
        self.preempted: Counter[str] = Counter()
        """By whose wish."""
        self.kept_tokens = self.recomputed_tokens = 0
        """Of preempted requests that came back: tokens whose KV was there again, and those computed a second time."""
        self.fallbacks = 0
        """Calls of the policy that raised."""
        self.jobs: dict[str, ScheduledJob] = {}
        self._lost: dict[str, int] = {}
        """Of a preempted request: how many tokens it had computed."""
        self._why = BY_MEMORY
        self._aged_at = 0.0

    def add_request(self, request: Request) -> None:
        """A request enters, with its key."""
        if request.request_id not in self.requests:
            # Without a key it comes when it came: keys are times, or levels of which the first is 0.
            otherwise: Any = time.monotonic() if self.policy_in_force.name == "shortest" else 0
            request.priority = self._fenced(lambda: self._enter(request), otherwise)
        try:
            super().add_request(request)
        except BaseException:
            if request.request_id not in self.requests:  # refused: vLLM will not end it
                self.jobs.pop(request.request_id, None)
            raise

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan one step: make way for the first request, let vLLM plan, and charge each request what it is served."""
        now = time.monotonic()
        if len(self.waiting):
            if now - self._aged_at >= AGE_EVERY_S:
                self._aged_at = now
                unused: list[Request] = []
                for request in self._fenced(lambda: self._late(now), unused):
                    self._requeue(request)
            victim = self._fenced(self._victim, None)
            if victim is not None:
                self.running.remove(victim)
                self._why = BY_POLICY
                try:
                    self._preempt_request(victim, now)
                finally:
                    self._why = BY_MEMORY
            if len(self._lost):
                self._fenced(self._bring_ahead, None)
        planned = super().schedule(*args, **kwargs)
        self._fenced(lambda: self._charge(planned), None)
        return planned

    def waiting_by_level(self) -> dict[int, int]:
        """Return how many requests wait at each level of mlfq; with another policy all at level 0. From any thread."""
        levels: Counter[int] = Counter({0: 0})
        waiting = [*list(getattr(self.waiting, "_heap", ())), *list(getattr(self.kv_holding_waiting, "_heap", ()))]
        for request in waiting:
            job = self.jobs.get(request.request_id)
            levels[job.level if job is not None else 0] += 1
        return dict(levels)

    # What vLLM calls.

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """Its KV is saved before its blocks go, also where vLLM itself preempts it for want of memory."""
        computed = request.num_computed_tokens
        before = getattr(self.connector, "before_preemption", None)
        if before is not None and not drop_stale_output:
            self._fenced(lambda: before(request), None)
        self._forget_uncomputed(request)
        super()._preempt_request(request, timestamp, drop_stale_output)
        # In the step in which it was preempted it may come back, as after `reset_prefix_cache`.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self.preempted[self._why] += 1
        self._lost[request.request_id] = computed
        job = self.jobs.get(request.request_id)
        if job is not None:
            job.preemptions += 1
            job.since_admission, job.waiting_since = 0.0, timestamp

    def _forget_uncomputed(self, request: Request) -> None:
        """Hide blocks that a preempted request has not computed: vLLM caches them when it plans their step.

        By priority vLLM also takes back what it has planned in this step. A request that then found such a block would
        use whatever was in it before. (First come, first served, vLLM preempts only requests that it has not planned
        yet.)
        """
        manager = self.kv_cache_manager
        groups = manager.coordinator.single_type_managers
        for group, block_ids in zip(groups, manager.get_block_ids(request.request_id), strict=True):
            hide_blocks(manager.block_pool, block_ids[request.num_computed_tokens // group.block_size :])

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.jobs.pop(request.request_id, None)
        self._lost.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    # What the policy is asked.

    def _enter(self, request: Request) -> Any:
        predicted = hints_of(request.kv_transfer_params).predicted_tokens
        answered = len(resumed_tokens(request.sampling_params))  # not yet the request's own
        prompt = request.num_tokens + answered - self._on_device(request)
        job = new_job(time.monotonic(), prompt, request.max_tokens, predicted, int(request.priority))
        job.answered = answered
        self.policy_in_force.enter(job)
        self.jobs[request.request_id] = job
        return job.key

    def _on_device(self, request: Request) -> int:
        """Leading tokens whose KV the device has now in every group. O(blocks)."""
        manager = self.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        return manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1]

    def _late(self, now: float) -> list[Request]:
        """Those whose key is another one now: still in the heap by their old one."""
        jobs = self.jobs
        return [r for r in self.waiting if r.request_id in jobs and self.policy_in_force.age(jobs[r.request_id], now)]

    def _requeue(self, request: Request) -> None:
        self.waiting.remove_request(request)
        request.priority = self._key(request)
        self.waiting.add_request(request)

    def _key(self, request: Request) -> Any:
        return self.jobs[request.request_id].key

    def _victim(self) -> Request | None:
        """Return the request that makes way for the first that could run; None: none has to, or none may."""
        first = self._first()
        if first is None or not self._is_short(first) or first.request_id not in self.jobs:
            return None
        jobs = self.jobs
        may_go = (
            (request, jobs[request.request_id])
            for request in self.running
            if request.request_id in jobs and self._request_blocks_can_be_freed(request)
        )
        to = jobs[first.request_id]
        to.left_tokens = max(0, first.num_tokens - first.num_computed_tokens - self._lost.get(first.request_id, 0))
        return victim_for(self.policy_in_force, to, may_go)

    def _first(self) -> Request | None:
        """Return the waiting request that vLLM would admit next, passing over those that wait for a load or a
        grammar."""
        ready = [r for r in self.kv_holding_waiting if r.request_id in self.finished_recving_kv_req_ids]
        if ready:
            return ready[0]
        holds_back: Callable[[str], bool] = getattr(self.connector, "holds_back", lambda request_id: False)
        for request in self.waiting:
            if not self._is_blocked_waiting_status(request.status) and not holds_back(request.request_id):
                return request
        return None

    def _is_short(self, request: Request) -> bool:
        """Whether it lacks a run slot, or free blocks while no save is about to free any."""
        if len(self.running) + self.num_waiting_for_streaming_input >= self.max_num_active_reqs:
            return True
        if self.connector is not None and self.connector.has_pending_block_frees():
            return False
        return self.kv_cache_manager.block_pool.get_num_free_blocks() < needed_blocks(self, request)

    def _bring_ahead(self) -> None:
        """The next preempted ones find their KV on the device when their turn comes."""
        ahead = getattr(self.connector, "bring_ahead", None)
        if ahead is None:
            return
        # Not by going through the queue, which may be long, in every step.
        lost = (self.requests[request_id] for request_id in self._lost)
        waiting = (r for r in lost if r.status in (RequestStatus.PREEMPTED, RequestStatus.WAITING))
        for request in nsmallest(AHEAD, waiting):
            ahead(request)

    def _charge(self, planned: Any) -> None:
        running = planned.scheduled_cached_reqs
        for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            if request_id in running.resumed_req_ids and request_id in self._lost:
                lost = self._lost.pop(request_id)
                self.recomputed_tokens += max(0, lost - computed)
                self.kept_tokens += min(lost, computed)
        for request_id, tokens in planned.num_scheduled_tokens.items():
            request, job = self.requests[request_id], self.jobs.get(request_id)
            if job is None:
                continue
            units = 1.0 if tokens == 1 else self.step_time.units(tokens, 0.0)
            job.since_admission += units
            job.answered = request.num_output_tokens
            job.left_tokens = max(0, request.num_tokens - request.num_computed_tokens - 1)
            if self.policy_in_force.served(job, units):
                request.priority = self._key(request)  # it runs: no heap holds it

    def _fenced(self, decide: Callable[[], T], otherwise: T) -> T:
        try:
            return decide()
        except Exception:
            self.fallbacks += 1
            if self.fallbacks == 1:
                logger.exception(
                    "the scheduling policy failed; such requests go first come, first served (logged once)"
                )
            return otherwise
