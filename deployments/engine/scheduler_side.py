"""The connector's scheduler side: which tokens of a request arrive from outside, and which blocks are saved when.

What arrives is for the load paths to say (`deployments.engine.load_paths.base`), which are asked in their order.

Leans on vLLM: `vllm.v1.request.Request` (`block_hashes`, `num_computed_tokens`, `num_prompt_tokens`,
`num_tokens`, `kv_transfer_params`, `status`). Everything here runs on the engine thread.

Rules that vLLM sets (DESIGN §7, traps of the connector):

* tokens to load are a whole number of blocks, and fewer than the request's tokens: the last one is computed;
* `Request.num_computed_tokens`, read while a step is being built, counts tokens whose KV is already written (the engine
  does not schedule asynchronously), so a block below that count may be saved. Two exceptions, in which nothing may:
  while a load is in flight it counts tokens that have not arrived yet; and in the step that admits a request it counts
  prefix hits on blocks that another request of that same step is only about to compute. What the step computes for
  the request itself may be saved layer by layer, if the step counts (`save_step`);
* blocks may be handed out again as soon as a request ends: a save holds them by reference count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from deployments.engine.load_paths.base import WAIT, Ask, LoadPath
from deployments.engine.pool.block_owners import NO_OWNER, BlockOwners, Owner
from deployments.engine.request_saves import RequestSaves
from deployments.engine.request_scores import RequestScores
from deployments.engine.tracked_request import PlannedChain, TrackedRequest
from deployments.protocol.engine_hints import hints_of
from deployments.protocol.kv_port import KVPort
from deployments.protocol.log_lines import names_request
from deployments.protocol.wire import KV_CACHE_USAGE, KVCacheUsage
from deployments.transfer.shared_loads import SharedLoads
from deployments.transfer.threads import KVTransfer
from kvmanager.moves.plan import Plan

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SchedulerSide:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        port: KVPort,
        transfer: KVTransfer,
        paths: Sequence[LoadPath],
        saves: RequestSaves,
        scores: RequestScores,
        owners: BlockOwners,
        block_size: int,
        replica: str,
        load_deadline_s: float,
    ) -> None:
        self._port, self._transfer, self._replica = port, transfer, replica
        self._paths = tuple(paths)
        self._for_all = tuple(path for path in paths if not path.needs_state)
        self._saves, self._scores, self._owners = saves, scores, owners
        self._block_size = block_size
        self._load_deadline_s = load_deadline_s
        self._tracked: dict[str, TrackedRequest] = {}
        self._shared = SharedLoads()

    @names_request
    def add(self, request: Request) -> None:
        """A request has entered the scheduler, with its plan."""
        hints = hints_of(request.kv_transfer_params)
        plan = hints.plan or Plan()
        tracked = self._tracked[request.request_id] = TrackedRequest(
            request,
            PlannedChain(plan.segments, plan.lease_id, max(self._load_deadline_s, plan.expected.deadline_s)),
            owner=Owner(hints.tenant, hints.fidelity),
        )
        for path in self._paths:  # first of all: a path may give the request other names
            path.entered(tracked, hints)
        self._saves.entered(tracked, hints)
        self._scores.entered(tracked, hints.plan)

    @names_request
    def tokens_to_load(self, request: Request, device_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `device_tokens` a planned load brings, and whether asynchronously.

        None: another request's load is bringing them, or a path waits for something; vLLM asks again in its next step.
        May be asked many times; the last answer before `start_load` is the one that vLLM acted on.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or device_tokens % self._block_size:
            return 0, False
        if tracked.wait.goes_on:
            return None, False
        first = device_tokens // self._block_size
        proposal: Ask = None
        for path in self._paths if tracked.state else self._for_all:
            proposal = path.propose(tracked, first)
            if proposal is not None:
                break
        if proposal is WAIT:
            return None, False
        tracked.proposed(device_tokens, proposal)
        if proposal is not None and proposal.boundary_block:
            request.shared_prefix_boundary = proposal.boundary_block * self._block_size
        if proposal is None or proposal.end_block <= first:
            return 0, False
        if tracked.wait.left:
            awaited = self._shared.awaited(request.block_hashes, first, proposal.end_block, device_tokens)
            if awaited is not None:
                tracked.wait.begin(awaited)
                return None, False
        return (proposal.end_block - first) * self._block_size, proposal.is_async

    @names_request
    def start_load(
        self, request: Request, block_ids: list[int], num_tokens: int, tables: Sequence[Sequence[int]] = ()
    ) -> None:
        """vLLM has given the request `block_ids`; bring `num_tokens` tokens after those it has on the device.

        `tables`: by group of a model with windows.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if request.block_hashes:
            self._owners.claim(bytes(request.block_hashes[0]), tracked.owner)
        for path in tuple(tracked.state):
            path.admitted(tracked)
        awaited = tracked.wait.end()
        if awaited is not None:
            self._transfer.count_shared(tracked.device_tokens - awaited.device_tokens)
        if num_tokens == 0:
            tracked.sources.admitted(tracked.device_tokens)
            return
        proposal = tracked.proposal
        assert proposal is not None, "vLLM loads what was proposed"
        first = tracked.device_tokens // self._block_size
        end = first + num_tokens // self._block_size
        tracked.begin_load(end * self._block_size, tables)
        self._shared.begin(request.request_id, request.block_hashes, first, end)
        tracked.sources.load_begins(time.monotonic())
        proposal.path.start(tracked, block_ids, proposal, self._end_load)

    def finish_load(self, request_id: str) -> None:
        """An asynchronous load has ended; vLLM has already set `num_computed_tokens` to what arrived."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.is_loading:
            self._end_load(tracked, min(tracked.request.num_computed_tokens, tracked.loading_upto_tokens))

    def _end_load(self, tracked: TrackedRequest, arrived: int) -> None:
        failed = arrived < tracked.loading_upto_tokens
        tracked.end_load()
        self._shared.end(tracked.request.request_id, arrived // self._block_size if failed else None)
        by_tier = tracked.plan.by_tier(tracked.device_tokens, arrived, self._block_size) if arrived else {}
        tracked.sources.load_ends(time.monotonic(), by_tier)
        if tracked.proposal is not None:
            tracked.proposal.path.ended(tracked, arrived)
        if failed:
            # Not a second time: vLLM asks again when nothing arrived, and would load the same bad segment for ever.
            tracked.give_plan_up(arrived // self._block_size)

    def save_progress(self, request_ids: list[str]) -> None:
        """Save what requests have filled so far: the prompt once it is computed, then every full segment.

        `request_ids` are of requests that run in this step and were admitted in an earlier one.
        """
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.is_loading:
                continue
            if tracked.state:
                for path in tuple(tracked.state):
                    path.advanced(tracked)
            self._saves.advanced(tracked)

    def save_step(self, request_id: str, computed_tokens: int, step_tokens: int, admitted: bool) -> None:
        """Save or hold what the step that is being planned computes of a request (`RequestSaves.planned`)."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._saves.planned(tracked, computed_tokens, step_tokens, admitted)

    @names_request
    def finish(self, request: Request) -> dict[str, KVCacheUsage] | None:
        """The request ends; its blocks are still its own. Save the rest and say where the prompt's KV came from."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        self._shared.end(request.request_id)
        for path in tuple(tracked.state):
            path.left(tracked)
        self._scores.finished(tracked)
        if not tracked.is_loading:
            computed = request.num_computed_tokens // self._block_size
            self._transfer.count_dropped(self._saves.save_rest(tracked, computed))
            if tracked.saving.blocks < computed and computed * self._block_size < tracked.saving.limits.least_tokens:
                self._transfer.count_short()
            self._port.release(tracked.plan.lease_id)
        self._saves.left(tracked)
        return {KV_CACHE_USAGE: tracked.sources.usage(self._replica)}

    def usage_so_far(self, request_id: str) -> dict[str, KVCacheUsage] | None:
        """Return the answer that `finish` will give for a request whose prompt has been computed."""
        tracked = self._tracked.get(request_id)
        return {KV_CACHE_USAGE: tracked.sources.usage(self._replica)} if tracked else None

    def tracked(self, request_id: str) -> TrackedRequest | None:
        """What is remembered of a request; None: it has gone."""
        return self._tracked.get(request_id)

    def owner_of_block(self, block_hash: bytes) -> Owner:
        """The owner of the request that has this block. O(blocks of all requests here): for rare cases."""
        found = (tracked for tracked in self._tracked.values() if block_hash in tracked.request.block_hashes)
        return next((tracked.owner for tracked in found), NO_OWNER)

    def nothing_runs(self) -> None:
        """No request is in this step: one that waits for neither load nor grammar wants blocks that none frees."""
        statuses = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        tracked = self._tracked.values()
        if any(not (t.is_loading or t.wait.goes_on) and t.request.status in statuses for t in tracked):
            self._saves.make_room()
