"""The connector's scheduler side: which tokens of a request arrive from outside, and which blocks are saved when.

Leans on vLLM: `vllm.v1.request.Request` (`block_hashes`, `num_computed_tokens`, `num_prompt_tokens`,
`num_tokens`, `prompt_token_ids`, `kv_transfer_params`, `status`), `BlockPool.touch` / `free_blocks` /
`blocks`, `KVCacheManager.get_block_ids`. Everything here runs on the engine thread.

Rules that vLLM sets (DESIGN §7, traps of the connector):

* tokens to load are a whole number of blocks, and fewer than the request's tokens: the last one is computed;
* `Request.num_computed_tokens`, read while a step is being built, counts tokens whose KV is already written (the engine
  does not schedule asynchronously), so a block below that count may be saved. Two exceptions, in which nothing may:
  while a load is in flight it counts tokens that have not arrived yet; and in the step that admits a request it counts
  prefix hits on blocks that another request of that same step is only about to compute. What the step computes for
  the request itself may be saved layer by layer, if the step counts (`save_step`);
* blocks may be handed out again as soon as a request ends: a save holds them by reference count.

A request's plan also says how hot its prompt is; the blocks get these scores before they can become victims
(`deployments.engine.pool.hotness_queue`). New tokens, which the manager does not know yet, count as used once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from deployments.engine.blending.blend import BlendOrder
from deployments.engine.blending.blends import Blends
from deployments.engine.pool.block_owners import NO_OWNER, BlockOwners, Owner
from deployments.engine.pool.hidden_blocks import hide_blocks, show_blocks
from deployments.engine.pool.hotness_queue import HotnessQueue, cached_blocks, score_blocks
from deployments.engine.request_saves import RequestSaves
from deployments.engine.scheduling.preempted_kv import PreemptedKV
from deployments.engine.sparse.requests import NOTHING_SAVED, SparseRequests, entered
from deployments.engine.tracked_request import TrackedRequest
from deployments.protocol.engine_hints import hints_of
from deployments.protocol.kv_port import KVPort
from deployments.protocol.log_lines import names_request
from deployments.protocol.wire import KV_CACHE_USAGE, KVCacheUsage
from deployments.transfer.jobs import load_parts
from deployments.transfer.layerwise_step import LayerwiseStep
from deployments.transfer.load_pace import load_pace
from deployments.transfer.shared_loads import SharedLoads
from deployments.transfer.threads import KVTransfer, LoadJob
from kvmanager.loading.short_prompts import UNMEASURED_BLOCKS, RepeatedBlocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class SchedulerSide:
    """See the module's docstring. `on_engine_thread` runs a function between two steps; from any thread."""

    def __init__(
        self,
        *,
        port: KVPort,
        transfer: KVTransfer,
        kv_cache_manager: KVCacheManager,
        block_size: int,
        blocks_per_segment: int,
        replica: str,
        on_engine_thread: Callable[[Callable[[], None]], Any],
        layerwise: LayerwiseStep,
        blends: Blends,
        num_running: Callable[[], int],
        max_step_tokens: Callable[[], int],
        load_deadline_s: float,
        make_room: Callable[[], None] = lambda: None,
        ttft_target_s: float | None = None,
    ) -> None:
        """`num_running`: requests in the engine's steps now; `max_step_tokens`: what the next one computes at most."""
        self._port, self._transfer, self._replica = port, transfer, replica
        self._kv_cache_manager, self._pool = kv_cache_manager, kv_cache_manager.block_pool
        self._block_size, self._blocks_per_segment = block_size, blocks_per_segment
        self.saves = RequestSaves(
            kv_cache_manager, transfer, layerwise, on_engine_thread, block_size, blocks_per_segment
        )
        self.kept = PreemptedKV(port, self.saves, block_size, on_engine_thread, self._score)
        self._layerwise, self._blends = layerwise, blends
        self._num_running, self._max_step_tokens, self._make_room = num_running, max_step_tokens, make_room
        self._load_deadline_s, self._ttft_target_s = load_deadline_s, ttft_target_s
        self.queue: HotnessQueue | None = None
        """The pool's free blocks by hotness; None: vLLM's own order."""
        self.owners = BlockOwners()
        """Whose the blocks of the pool are."""
        self.sparse: SparseRequests | None = None
        """Requests with a sparse prefix; None: the engine presents none, and they are ordinary ones."""
        self._tracked: dict[str, TrackedRequest] = {}
        self._shared = SharedLoads()
        self._repeated = RepeatedBlocks()

    @names_request
    def add(self, request: Request) -> None:
        """A request has entered the scheduler, with its plan."""
        hints = hints_of(request.kv_transfer_params)
        plan = hints.plan
        sparse = entered(self.sparse, request, hints)
        loads = list(sparse.loads if sparse else plan.segments if plan else ())
        covered = loads[-1].end_block if loads else 0
        if covered and (loads[-1].last_hash or loads[-1].key) != request.block_hashes[covered - 1]:
            covered = 0  # a tolerant prompt's exact twin: under its own names nothing is stored, and children need it
        least_tokens = hints.short_tokens or UNMEASURED_BLOCKS * self._block_size
        is_short = request.num_prompt_tokens < least_tokens
        tracked = self._tracked[request.request_id] = TrackedRequest(
            request=request,
            loads=loads,
            lease_id=plan.lease_id if plan else 0,
            saved_blocks=NOTHING_SAVED if sparse else covered,
            load_within_s=max(self._load_deadline_s, plan.expected.deadline_s if plan else 0.0),
            least_tokens=least_tokens,
            repeated_blocks=self._repeated.met(request.block_hashes) if is_short else 0,
            tenant=hints.tenant,
            fidelity=hints.fidelity,
            blend=None if sparse else self._blends.of_request(request, plan, hints.fidelity),
            save_answer=hints.save_answer,
            sparse=sparse,
        )
        self.saves.begin(tracked)
        if self.queue is not None:
            if plan and self.queue.hear(plan.epoch, plan.now):
                tracked.scores, tracked.now, tracked.epoch = plan.scores, plan.now, plan.epoch
            score_blocks(self.queue, tracked, cached_blocks(self._pool, request.block_hashes))

    @names_request
    def tokens_to_load(self, request: Request, device_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `device_tokens` a planned load brings, and whether asynchronously.

        None: another request's load is bringing them, or its blend waits for room; vLLM asks again in its next step.
        May be asked many times; the last answer before `start_load` is the one that vLLM acted on.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or device_tokens % self._block_size:
            return 0, False
        if tracked.is_waiting:
            return None, False
        if tracked.sparse is not None and self.sparse is not None:
            tokens = self.sparse.tokens_to_load(tracked, device_tokens, self._shared)
            return tokens, bool(tokens)
        if self.kept.awaits(tracked, device_tokens):
            return None, False
        if tracked.awaited is not None and tracked.awaited.failed:
            self._give_plan_up(tracked, device_tokens // self._block_size)
        tracked.device_tokens = device_tokens
        first = device_tokens // self._block_size
        prefix_end = tracked.loadable_end(first, self._block_size)
        blend_end = self._blend_end(tracked, prefix_end)
        if blend_end is None:
            return None, False
        tracked.blend_end, end = blend_end, max(blend_end, prefix_end)
        if end <= first:
            return 0, False
        if tracked.waits_left:
            awaited = self._shared.awaited(request.block_hashes, first, end, device_tokens)
            if awaited is not None:
                tracked.waits_left -= 1
                tracked.awaited = awaited
                return None, False
        rest = request.num_tokens - end * self._block_size
        tracked.layerwise_patience_s = None
        if tracked.blend_end:
            return (end - first) * self._block_size, True
        # Without an idle load thread the engine's step would wait for the loads of others.
        if self._transfer.has_idle_loader:
            tracked.layerwise_patience_s = self._layerwise.choice.patience_s(
                load_parts(tracked.loads_between(first, end), first, end),
                end * self._block_size,
                min(rest, self._max_step_tokens()),
                self._num_running(),
                self._layerwise.buffer.free_bytes,
                tracked.load_within_s,
            )
        return (end - first) * self._block_size, tracked.layerwise_patience_s is None

    def _blend_end(self, tracked: TrackedRequest, prefix_end: int) -> int | None:
        """The block up to which a prompt is blended, behind its own stored KV; 0: not; None: when there is room."""
        blend = tracked.blend
        if blend is None:
            return 0
        block = self._block_size
        end = blend.end_block(prefix_end * block, (tracked.request.num_prompt_tokens - 1) // block, block)
        if end <= prefix_end:
            return 0
        held = end - tracked.device_tokens // block
        takes = self._blends.takes(blend, (end - prefix_end) * block, held)
        if takes is False:
            tracked.blend, end = None, 0
        return None if takes is None else end

    @names_request
    def start_load(self, request: Request, block_ids: list[int], num_tokens: int) -> None:
        """vLLM has given the request `block_ids`; bring `num_tokens` tokens after those it has on the device."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if request.block_hashes:
            self.owners.claim(bytes(request.block_hashes[0]), tracked.owner)
        tracked.hidden = ()  # those of before a preemption
        self.kept.end(tracked)
        blend, tracked.blend = tracked.blend, None  # once: whatever a preemption throws away is computed
        if tracked.awaited is not None:
            self._transfer.count_shared(tracked.device_tokens - tracked.awaited.device_tokens)
            tracked.awaited = None
        if num_tokens == 0:
            if tracked.sources is None:
                tracked.sources = {"device": tracked.device_tokens}
            return
        first = tracked.device_tokens // self._block_size
        end = first + num_tokens // self._block_size
        loads = tracked.loads_between(first, end)
        tracked.loading_upto_tokens = end * self._block_size
        self._shared.begin(request.request_id, request.block_hashes, first, end)
        tracked.load_began = time.monotonic()
        if blend is not None and tracked.blend_end:
            prefix_end = max(first, loads[-1].end_block) if loads else first
            self._blends.start(
                BlendOrder(
                    request_id=request.request_id,
                    plan=blend,
                    tokens=request.prompt_token_ids or (),
                    block_ids=block_ids,
                    device_end=first,
                    prefix=loads,
                    prefix_end=prefix_end,
                    end=end,
                    lease_id=tracked.lease_id,
                    within_s=tracked.load_within_s,
                    on_done=tracked.note_blended,
                )
            )
            return
        job = LoadJob(request.request_id, tracked.lease_id, loads, first, block_ids[first:end])
        if tracked.layerwise_patience_s is None:
            target_s, patience_s = self._ttft_target_s, self._load_deadline_s
            pace = load_pace(request, loads, first, end, self._block_size, target_s, patience_s)
            job = replace(job, pace=pace, within_s=tracked.load_within_s)
            if tracked.sparse is not None and self.sparse is not None:
                job = replace(job, pace=None, write=partial(self.sparse.write, tracked.sparse, job.block_ids))
            self._transfer.submit_load(job, pace.give_up_at if pace else math.inf)
        else:
            blocks = hide_blocks(self._pool, block_ids[first:])
            self._layerwise.begin_load(
                job,
                tracked.layerwise_patience_s,
                lambda arrived: self._finish_layerwise(tracked, first, arrived, blocks),
            )

    def _finish_layerwise(
        self, tracked: TrackedRequest, first: int, arrived: int, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """The step of a layerwise load has been computed; the blocks before block `arrived` of the sequence are there.

        If that is all of the load, the rest of the step counts too. Else the rest is recomputed.
        """
        request = tracked.request
        end = arrived
        if arrived * self._block_size == tracked.loading_upto_tokens:
            end = first + len(blocks)
        else:
            tracked.hidden, tracked.hidden_from = blocks[end - first :], end
        show_blocks(self._pool, request, blocks, first, end, self._block_size)
        self._end_load(tracked, arrived * self._block_size)

    def _show_computed(self, tracked: TrackedRequest) -> None:
        """Let those blocks of a failed load that have been computed by now into the prefix cache."""
        request, first = tracked.request, tracked.hidden_from
        end = min(request.num_computed_tokens // self._block_size, first + len(tracked.hidden))
        if end > first:
            show_blocks(self._pool, request, tracked.hidden, first, end, self._block_size)
            tracked.hidden, tracked.hidden_from = tracked.hidden[end - first :], end

    def finish_load(self, request_id: str) -> None:
        """An asynchronous load has ended; vLLM has already set `num_computed_tokens` to what arrived."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.is_loading:
            self._end_load(tracked, min(tracked.request.num_computed_tokens, tracked.loading_upto_tokens))

    def _end_load(self, tracked: TrackedRequest, arrived: int) -> None:
        failed = arrived < tracked.loading_upto_tokens
        tracked.loading_upto_tokens = 0
        self._shared.end(tracked.request.request_id, arrived // self._block_size if failed else None)
        tracked.load_ended = time.monotonic()
        if tracked.sources is None and arrived:
            tracked.sources = tracked.tokens_by_tier(arrived, self._block_size)
        if failed:
            # Not a second time: vLLM asks again when nothing arrived, and would load the same bad segment for ever.
            self._give_plan_up(tracked, arrived // self._block_size)

    @staticmethod
    def _give_plan_up(tracked: TrackedRequest, arrived: int) -> None:
        """Load nothing more of a plan of which only what lies before block `arrived` came: compute it, and save it."""
        tracked.saved_blocks = min(tracked.saved_blocks, arrived)
        tracked.loads, tracked.blend = [], None

    def save_progress(self, request_ids: list[str]) -> None:
        """Save what requests have filled so far: the prompt once it is computed, then every full segment.

        `request_ids` are of requests that run in this step and were admitted in an earlier one.
        """
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.is_loading:
                continue
            if tracked.hidden:
                self._show_computed(tracked)
            computed = tracked.request.num_computed_tokens // self._block_size
            prompt = tracked.request.num_prompt_tokens // self._block_size
            end = computed - computed % self._blocks_per_segment
            if computed >= prompt:
                end = max(end, prompt)
            self.saves.save(tracked, end)

    def save_step(self, request_id: str, computed_tokens: int, step_tokens: int, admitted: bool) -> None:
        """Save, layer by layer, what the step that is being planned computes of a prompt: segments that it fills.

        The step computes `step_tokens` tokens after the first `computed_tokens`. In the step that admits a request,
        what lies before those may be KV that another request is only about to compute (see above): not saved yet.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or not self._layerwise.saves or step_tokens < self._block_size:
            return
        if admitted and tracked.saved_blocks * self._block_size < computed_tokens:
            return
        end = (computed_tokens + step_tokens) // self._block_size
        prompt = tracked.request.num_prompt_tokens // self._block_size
        self.saves.save(tracked, prompt if end >= prompt else end - end % self._blocks_per_segment, in_this_step=True)

    @names_request
    def finish(self, request: Request) -> dict[str, KVCacheUsage] | None:
        """The request ends; its blocks are still its own. Save the rest and say where the prompt's KV came from."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        self._shared.end(request.request_id)
        self.kept.end(tracked)
        if tracked.sparse is not None and self.sparse is not None:
            self.sparse.leave(request.request_id)
        if tracked.hidden and not tracked.is_loading:
            self._show_computed(tracked)
        self._score(tracked)
        if not tracked.is_loading:
            computed = request.num_computed_tokens // self._block_size
            self._transfer.count_dropped(self.saves.save(tracked, computed))
            if tracked.saved_blocks < computed and computed * self._block_size < tracked.least_tokens:
                self._transfer.count_short()
            self._port.release(tracked.lease_id)
        else:
            self._blends.cancel(request.request_id)
        self.saves.end(request.request_id)
        return {KV_CACHE_USAGE: tracked.usage(self._replica)}

    def usage_so_far(self, request_id: str) -> dict[str, KVCacheUsage] | None:
        """Return the answer that `finish` will give for a request whose prompt has been computed."""
        tracked = self._tracked.get(request_id)
        return {KV_CACHE_USAGE: tracked.usage(self._replica)} if tracked else None

    def tracked(self, request_id: str) -> TrackedRequest | None:
        """What is remembered of a request; None: it has gone."""
        return self._tracked.get(request_id)

    def owner_of_block(self, block_hash: bytes) -> Owner:
        """The owner of the request that has this block. O(blocks of all requests here): for rare cases."""
        found = (tracked for tracked in self._tracked.values() if block_hash in tracked.request.block_hashes)
        return next((tracked.owner for tracked in found), NO_OWNER)

    def nothing_runs(self) -> None:
        """No request is in this step: one that waits for neither load nor grammar wants blocks that none frees."""
        waits_for_blocks = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if any(
            not (t.is_loading or t.is_waiting) and t.request.status in waits_for_blocks for t in self._tracked.values()
        ):
            self._make_room()

    def _score(self, tracked: TrackedRequest) -> None:
        """Tell the queue how hot the blocks are that a request has."""
        if self.queue is not None:
            ids = self._kv_cache_manager.get_block_ids(tracked.request.request_id)[0]
            if not tracked.save_answer:
                ids = ids[: tracked.request.num_prompt_tokens // self._block_size]
            score_blocks(self.queue, tracked, [self._pool.blocks[block_id] for block_id in ids])
