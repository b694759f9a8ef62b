"""vLLM's KV connector interface, translated to `SchedulerSide` and `KVTransfer`. No policy and no state of its own.

Leans on vLLM: `KVConnectorBase_V1` and the order in which the engine calls its hooks (its module docstring), and
`SupportsHMA`, without which vLLM would keep windows as if they were full attention. vLLM makes an instance for the
scheduler and one for each worker. With one worker both live in one process, and `attach` gives each its half once the
engine is built. Workers of a tensor-parallel engine are processes of their own (`deployments.engine.ranks`): there the
scheduler's instance moves the KV of all ranks, and a step's metadata tells the ranks what they report to vLLM.

Before `attach` the connector answers "nothing cached" to everything, so a half-built replica is merely slow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from deployments.engine.groups import ONE_DENSE, read_groups
from deployments.engine.process.surroundings import prepare_process
from deployments.engine.ranks import SharedCaches, map_caches, share_caches
from deployments.engine.scheduler_side import SchedulerSide
from deployments.engine.tracked_request import TrackedRequest
from deployments.transfer.layerwise_step import LayerwiseStep
from deployments.transfer.threads import KVTransfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The loads that have ended, for each rank to report in this step, where ranks are processes of their own.

    Empty for a single worker, which shares the replica's `KVTransfer` with the scheduler side.
    """

    ended: frozenset[str] = frozenset()
    """Requests."""
    failed: frozenset[str] = frozenset()
    """Of these, those that must compute their prompt."""
    failed_blocks: frozenset[int] = frozenset()
    """Device blocks whose KV did not arrive."""


class PreemptionHooks(Protocol):
    """What keeps the KV of preempted requests: told of preemptions, and asked before one.

    On the engine thread, while a step is planned.
    """

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of a preempted request are about to be free: no other preemption is needed."""
        ...

    def before(self, tracked: TrackedRequest) -> None:
        """Hear that a running request is about to lose its blocks."""
        ...

    def ahead(self, tracked: TrackedRequest) -> None:
        """Hear that a preempted request is among the next to run."""
        ...

    def holds_back(self, tracked: TrackedRequest) -> bool:
        """Return whether a waiting request could not run now, if it were its turn."""
        ...


class CrossKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = read_groups(kv_cache_config)
        self.unsupported = groups if isinstance(groups, str) else None
        """Why nothing can be attached; None: it can."""
        self.groups = ONE_DENSE if isinstance(groups, str) else groups
        """Those of the model, where something can be attached."""
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.rank_caches: Sequence[dict[str, torch.Tensor]] = ()
        """Of the scheduler's instance: by rank, the tensors of its layers by name; empty: there is one worker, here."""
        self._shared: SharedCaches | None = None
        self.kv_cache_manager: KVCacheManager | None = None
        self._scheduler_side: SchedulerSide | None = None
        self._transfer: KVTransfer | None = None
        self._layerwise: LayerwiseStep | None = None
        self._preemption: PreemptionHooks | None = None
        self._layer_numbers: dict[str, int] = {}

    def attach(
        self,
        scheduler_side: SchedulerSide | None,
        transfer: KVTransfer,
        layerwise: LayerwiseStep | None,
        preemption: PreemptionHooks | None = None,
    ) -> None:
        """Start working. On the engine thread, between two steps. `preemption`: None where no KV outlives one.

        `layerwise`: None where no layer of a step can be waited for, because ranks are processes of their own.
        """
        self._scheduler_side, self._transfer, self._layerwise = scheduler_side, transfer, layerwise
        self._preemption = preemption

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is only a later miss."""
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember vLLM's tensors, one per layer, by layer name; those of one rank of several are moved and shared.

        Layers that attend to another one's KV are left out: their tensors are that one's, and no group has them.
        """
        if self.groups.group_of:
            kv_caches = {name: cache for name, cache in kv_caches.items() if name in self.groups.group_of}
        self.kv_caches = kv_caches
        self._layer_numbers = {name: number for number, name in enumerate(layer_names(kv_caches))}
        if self.unsupported is None and self._vllm_config.parallel_config.world_size > 1:
            prepare_process()
            try:
                self._shared = share_caches(kv_caches, self._vllm_config.compilation_config.static_forward_context)
            except ValueError:
                logger.exception("this rank's KV is not shared")

    def get_handshake_metadata(self) -> SharedCaches | None:
        """Where this rank's KV lies; None: in the process that moves it."""
        return self._shared

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads were started by the scheduler side already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """What this step loads layerwise of a layer is there when this returns, or given up."""
        number = self._layer_numbers.get(layer_name)
        # A layer that vLLM did not register has nothing to wait for here. A step that heard not all others counts not.
        if self._layerwise and number is not None:
            self._layerwise.wait_for_layer(number)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """What is saved layer by layer of this step may be copied now; everything else is saved between steps."""
        if self._layerwise and layer_name in self._layer_numbers:
            self._layerwise.layer_computed()

    def wait_for_save(self) -> None:
        """A save holds its blocks by reference count, so the step need not wait."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load has ended."""
        return None, self._transfer.take_finished_loads() if self._transfer else set(self._of_step.ended)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The same, and which of them must compute their prompt: of several groups vLLM takes no failed blocks."""
        results = super().get_transfer_results(finished_req_ids)
        if self._transfer:
            results.failed_recving = self._transfer.take_failed_requests(results.finished_recving)
        else:
            results.failed_recving = set(self._of_step.failed)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must recompute. Called once per step, when it has been computed and before it counts."""
        failed = self._layerwise.end_step() if self._layerwise else set()
        return failed | (self._transfer.take_failed_blocks() if self._transfer else self._of_step.failed_blocks)

    @property
    def _of_step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    # Scheduler side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Map the KV of all ranks: vLLM has heard from each where it lies. Where one cannot be mapped none is."""
        try:
            self.rank_caches = [map_caches(metadata[rank]) for rank in sorted(metadata)]
        except OSError:  # the rank has ended, or this machine keeps processes' files from each other
            logger.exception("the ranks' KV is not shared")

    def has_pending_block_frees(self) -> bool:
        """Whether a save of a preempted request's blocks is about to free them: no other preemption is needed."""
        return self._preemption is not None and self._preemption.holds_blocks

    def before_preemption(self, request: Request) -> None:
        """Called by `deployments.engine.scheduling`, not by vLLM, which tells no connector."""
        if self._preemption and (tracked := self._tracked(request.request_id)):
            self._preemption.before(tracked)

    def bring_ahead(self, request: Request) -> None:
        """The same, of a preempted request that is among the next."""
        if self._preemption and (tracked := self._tracked(request.request_id)):
            self._preemption.ahead(tracked)

    def holds_back(self, request_id: str) -> bool:
        """The same: whether a waiting request could not run now, if it were its turn."""
        tracked = self._tracked(request_id)
        if tracked is None:
            return False
        return tracked.wait.goes_on or (self._preemption is not None and self._preemption.holds_back(tracked))

    def _tracked(self, request_id: str) -> TrackedRequest | None:
        return self._scheduler_side.tracked(request_id) if self._scheduler_side else None

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM hands over its cache manager once it is built."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.kv_cache_manager = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        """A request has entered the scheduler."""
        if self._scheduler_side:
            self._scheduler_side.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens a load brings after those on the device, and whether asynchronously."""
        return self._scheduler_side.tokens_to_load(request, num_computed_tokens) if self._scheduler_side else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has its blocks: start the load."""
        if self._scheduler_side:
            tables = blocks.get_block_ids()
            ids = tables[self.groups.main]
            self._scheduler_side.start_load(request, ids, num_external_tokens, () if self.groups.is_plain else tables)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Called once per step: the moment to save what earlier steps have filled.

        A request that is admitted in this very step is left out: its prefix hits may be blocks that another request of
        the same step is only now about to compute (vLLM caches blocks when it allocates them).
        """
        if self._scheduler_side:
            running = scheduler_output.scheduled_cached_reqs
            self._scheduler_side.save_progress([r for r in running.req_ids if r not in running.resumed_req_ids])
            scheduled = scheduler_output.num_scheduled_tokens
            resumed = running.resumed_req_ids
            for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
                self._scheduler_side.save_step(request_id, computed, scheduled[request_id], request_id in resumed)
            for new in scheduler_output.scheduled_new_reqs:
                self._scheduler_side.save_step(
                    new.req_id, new.num_computed_tokens, scheduled[new.req_id], admitted=True
                )
            if not scheduler_output.total_num_scheduled_tokens:
                self._scheduler_side.nothing_runs()
        if self._layerwise:
            self._layerwise.begin_step(*_only_prompt(scheduler_output))
        return self._for_ranks() if self.rank_caches and self._transfer else StepMetadata()

    def _for_ranks(self) -> StepMetadata:
        assert self._transfer is not None
        ended = self._transfer.take_finished_loads()
        failed = self._transfer.take_failed_requests(ended)
        return StepMetadata(frozenset(ended), frozenset(failed), frozenset(self._transfer.take_failed_blocks()))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Loads have ended; vLLM has dealt with the failed blocks already."""
        if self._scheduler_side:
            for request_id in connector_output.finished_recving or ():
                self._scheduler_side.finish_load(request_id)

    def usage_so_far(self, request_id: str) -> dict[str, Any] | None:
        """Return the answer that `request_finished` will give for a request whose prompt has been computed."""
        usage = self._scheduler_side.usage_so_far(request_id) if self._scheduler_side else None
        return dict(usage) if usage else None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once; the usage travels back with the request's last output."""
        usage = self._scheduler_side.finish(request) if self._scheduler_side else None
        return False, dict(usage) if usage else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same: vLLM asks this of a connector that takes more than one group."""
        return self.request_finished(request, block_ids[0])


def _only_prompt(scheduled: SchedulerOutput) -> tuple[int, int]:
    """The tokens that a step computes of its only request, and those before them; (0, 0) for a step of several."""
    if len(scheduled.num_scheduled_tokens) != 1:
        return 0, 0
    (tokens,) = scheduled.num_scheduled_tokens.values()
    new = scheduled.scheduled_new_reqs
    return tokens, new[0].num_computed_tokens if new else scheduled.scheduled_cached_reqs.num_computed_tokens[0]


def layer_tensors(kv_caches: dict[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """vLLM's per-layer tensors in layer order."""
    return [kv_caches[name] for name in layer_names(kv_caches)]


def layer_names(kv_caches: dict[str, torch.Tensor]) -> list[str]:
    """The layers' names in layer order (the number in `model.layers.N.self_attn`)."""
    from vllm.model_executor.models.utils import extract_layer_index

    return sorted(kv_caches, key=extract_layer_index)
