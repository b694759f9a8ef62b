"""The connector's scheduler side: which tokens of a request arrive from outside, and which blocks are saved when.

Leans on vllm 0.32.0: `vllm.v1.request.Request` (`block_hashes`, `num_computed_tokens`, `num_prompt_tokens`,
`num_tokens`, `num_preemptions`, `kv_transfer_params`, `mm_features`), `BlockPool.touch` / `free_blocks` / `blocks`,
`KVCacheManager.get_block_ids`. Everything here runs on the engine thread.

Rules that vLLM sets (DESIGN §7, traps of the connector):

* tokens to load are a whole number of blocks, and fewer than the request's tokens: the last one is computed;
* `Request.num_computed_tokens`, read while a step is being built, counts tokens whose KV is already written (the engine
  does not schedule asynchronously), so a block below that count may be saved. Two exceptions, in which nothing may:
  while a load is in flight it counts tokens that have not arrived yet; and in the step that admits a request it counts
  prefix hits on blocks that another request of that same step is only about to compute;
* blocks may be handed out again as soon as a request ends: a save holds them by reference count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from deployments.kv_port import PLAN, KVPort, PlannedLoad
from deployments.kv_transfer import KVTransfer, LoadJob, SaveJob
from deployments.wire import KV_CACHE_USAGE, KVCacheUsage
from kvmanager.keys import BlockHash
from kvmanager.segments import SegmentSpan, split_segments

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@dataclass(slots=True)
class TrackedRequest:
    """What the connector remembers of one request while the scheduler has it."""

    request: Request
    loads: list[PlannedLoad]
    lease_id: int
    saved_blocks: int
    device_tokens: int = 0
    """Leading tokens that the device's own prefix cache had when vLLM last looked."""
    loading_upto_tokens: int = 0
    """End of the load in flight; 0 when there is none."""
    sources: dict[str, int] | None = None
    """Tokens by tier when the prompt was first admitted: what usage reports, whatever a preemption does later."""

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight; `num_computed_tokens` must not be trusted then."""
        return self.loading_upto_tokens > 0


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
        save_answers: bool,
        replica: str,
        on_engine_thread: Callable[[Callable[[], None]], Any],
    ) -> None:
        self._port = port
        self._transfer = transfer
        self._kv_cache_manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self._block_size = block_size
        self._blocks_per_segment = blocks_per_segment
        self._save_answers = save_answers
        self._replica = replica
        self._on_engine_thread = on_engine_thread
        self._tracked: dict[str, TrackedRequest] = {}

    def add(self, request: Request) -> None:
        """A request has entered the scheduler, with its plan."""
        plan = (request.kv_transfer_params or {}).get(PLAN)
        loads = [PlannedLoad(*segment) for segment in plan["segments"]] if plan else []
        covered = loads[-1].end_block if loads else 0
        self._tracked[request.request_id] = TrackedRequest(
            request=request, loads=loads, lease_id=plan["lease_id"] if plan else 0, saved_blocks=covered
        )

    def tokens_to_load(self, request: Request, device_tokens: int) -> int:
        """How many tokens after the first `device_tokens` a planned load brings.

        May be asked many times; the last answer before `start_load` is the one that vLLM acted on.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or device_tokens % self._block_size:
            return 0
        tracked.device_tokens = device_tokens
        return max(0, self._loadable_end(tracked, device_tokens // self._block_size) * self._block_size - device_tokens)

    def start_load(self, request: Request, block_ids: list[int], num_tokens: int) -> None:
        """vLLM has given the request `block_ids`; bring `num_tokens` tokens after those it has on the device."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if num_tokens == 0:
            if tracked.sources is None:
                tracked.sources = {"device": tracked.device_tokens}
            return
        first = tracked.device_tokens // self._block_size
        end = first + num_tokens // self._block_size
        loads = [load for load in tracked.loads if load.end_block > first and load.start_block < end]
        tracked.loading_upto_tokens = end * self._block_size
        self._transfer.submit_load(LoadJob(request.request_id, tracked.lease_id, loads, first, block_ids[first:end]))

    def finish_load(self, request_id: str) -> None:
        """A load has ended; vLLM has already set `num_computed_tokens` to what arrived."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.is_loading:
            return
        arrived = min(tracked.request.num_computed_tokens, tracked.loading_upto_tokens)
        failed = arrived < tracked.loading_upto_tokens
        tracked.loading_upto_tokens = 0
        if tracked.sources is None and arrived:
            tracked.sources = self._tokens_by_tier(tracked, arrived)
        if failed:
            # Not a second time: vLLM asks again when nothing arrived, and would load the same bad segment for ever.
            tracked.saved_blocks = min(tracked.saved_blocks, arrived // self._block_size)
            tracked.loads = []

    def save_progress(self, request_ids: list[str]) -> None:
        """Save what requests have filled so far: the prompt once it is computed, then every full segment.

        `request_ids` are of requests that run in this step and were admitted in an earlier one.
        """
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.is_loading:
                continue
            computed = tracked.request.num_computed_tokens // self._block_size
            prompt = tracked.request.num_prompt_tokens // self._block_size
            end = computed - computed % self._blocks_per_segment
            if computed >= prompt:
                end = max(end, prompt)
            self._save(tracked, end)

    def finish(self, request: Request) -> dict[str, KVCacheUsage] | None:
        """The request ends; its blocks are still its own. Save the rest and say where the prompt's KV came from."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if not tracked.is_loading:
            self._transfer.count_dropped(self._save(tracked, request.num_computed_tokens // self._block_size))
            self._port.release(tracked.lease_id)
        return {KV_CACHE_USAGE: self._usage(tracked)}

    def _loadable_end(self, tracked: TrackedRequest, first_block: int) -> int:
        """The block up to which planned segments follow `first_block` without a gap; the last token is left out."""
        end = first_block
        for load in tracked.loads:
            if load.end_block <= end:
                continue
            if load.start_block > end:
                break
            end = load.end_block
        return min(end, (tracked.request.num_tokens - 1) // self._block_size)

    def _tokens_by_tier(self, tracked: TrackedRequest, arrived_tokens: int) -> dict[str, int]:
        """Split the first `arrived_tokens` tokens by where they came from; device first, then the segments in order."""
        position = min(tracked.device_tokens, arrived_tokens)
        by_tier = {"device": position}
        for load in tracked.loads:
            end = min(load.end_block * self._block_size, arrived_tokens)
            if end > position:
                by_tier[load.tier] = by_tier.get(load.tier, 0) + end - position
                position = end
        return by_tier

    def _save(self, tracked: TrackedRequest, end_block: int) -> int:
        """Start saving up to `end_block`; returns the segments for which too many blocks are held, to try again."""
        request = tracked.request
        prompt_blocks = request.num_prompt_tokens // self._block_size
        if not self._save_answers:
            end_block = min(end_block, prompt_blocks)
        end_block = min(end_block, len(request.block_hashes))
        if end_block <= tracked.saved_blocks or request.mm_features:
            return 0
        spans = split_segments(
            cast("list[BlockHash]", request.block_hashes),
            tracked.saved_blocks,
            end_block,
            self._blocks_per_segment,
            prompt_blocks,
        )
        all_ids = self._kv_cache_manager.get_block_ids(request.request_id)[0]
        ids = [list(all_ids[span.start_block : span.start_block + span.num_blocks]) for span in spans]
        if not self._hold_and_submit(spans, ids):
            return len(spans)
        tracked.saved_blocks = end_block
        return 0

    def _hold_and_submit(self, spans: list[SegmentSpan], ids: list[list[int]]) -> bool:
        held = [self._pool.blocks[block_id] for segment in ids for block_id in segment]

        def free() -> None:
            self._pool.free_blocks(reversed(held))

        self._pool.touch(held)
        if self._transfer.submit_save(SaveJob(spans, ids, lambda: self._on_engine_thread(free))):
            return True
        free()
        return False

    def _usage(self, tracked: TrackedRequest) -> KVCacheUsage:
        by_tier = tracked.sources or {}
        reused = sum(by_tier.values())
        return KVCacheUsage(
            device=by_tier.get("device", 0),
            cpu=by_tier.get("cpu", 0),
            redis=by_tier.get("redis", 0),
            recomputed=tracked.request.num_prompt_tokens - reused,
            replica=self._replica,
        )
