"""Wires one replica's engine to the shared KV cache: connector, transfer threads, port, placement events.

The one place that reaches into a built engine: `EngineCore.scheduler.connector`, `Scheduler.kv_cache_manager`,
`Scheduler.kv_event_publisher`, the model runner, `KVCacheManager.allocate_slots` (and that a request which it gives
nothing is preempted only then), `get_kv_transfer_group`, `BlockPool`, and, for the layout of the CPU backend's cache,
`vllm.v1.attention.backends.cpu_attn._get_attn_isa`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from configs.blend_profile import read_blend_profile
from configs.settings import Settings, SettingsError
from deployments.engine.blending.blends import Blends, model_to_blend
from deployments.engine.checks import FP8_KV
from deployments.engine.connector import CrossKVConnector, layer_names, layer_tensors
from deployments.engine.heartbeat import Heartbeat
from deployments.engine.pool.control import PoolControl
from deployments.engine.pool.events import PlacementPublisher
from deployments.engine.pool.hotness_queue import order_by_hotness, order_by_recency
from deployments.engine.scheduler_side import SchedulerSide
from deployments.engine.scheduling.steps import steps_of
from deployments.engine.scheduling.wanted_blocks import wanted_blocks
from deployments.engine.sparse.opening import opener, sparse_coding
from deployments.engine.sparse.presenter import SparsePresenter
from deployments.engine.sparse.queries import QueryWatch
from deployments.engine.sparse.refusals import why_not, why_not_built
from deployments.engine.sparse.requests import OpenKept, SparseRequests
from deployments.engine.sparse.retained_slots import RetainedSlots
from deployments.port.layer_groups import group_ends
from deployments.protocol.kv_port import KVPort
from deployments.segment_store.sparse.coding import OFF
from deployments.transfer.layerwise_choice import LayerwiseChoice, MeasuredRates, group_bytes
from deployments.transfer.layerwise_step import LayerwiseStep
from deployments.transfer.layerwise_streams import streams_for
from deployments.transfer.segment_copy import SegmentCopier
from deployments.transfer.threads import KVTransfer
from kernels.paged.layout import LayoutKind, PagedLayout, cpu_layout_for
from kvmanager.segments.budgets import Budgets
from kvmanager.segments.sizes import check_segment_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")

HELD_POOL_SHARE = 0.5
"""Largest share of the device pool that saves in flight may hold, and another one for blends that wait.

What is beyond is not saved, or computed: others are to have room."""


class EngineLoop(Protocol):
    """Steps the engine: `deployments.engine.host.EngineThread`, or vLLM's own process with ours in it."""

    heartbeat: Heartbeat
    on_turn: Callable[[], None]
    """Called on the engine thread after every step and after calls between steps; must not block or raise."""

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        ...

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        ...

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine thread, between two steps; from any thread."""
        ...

    def wake(self) -> None:
        """Wake the engine for an event that it may be waiting for. From any thread."""
        ...


def why_not_moved(thread: EngineLoop, config: VllmConfig) -> str | None:
    """A sentence where the KV of an engine that is built with the connector cannot be moved; None where it can."""
    scheduler = thread.scheduler
    worker: Any = get_kv_transfer_group()
    unsupported: str | None = scheduler.connector.unsupported
    if unsupported is not None:
        return unsupported
    try:
        _layout(config, layer_tensors(worker.kv_caches)[0])
    except ValueError as error:
        return str(error)
    return None


class KVReuse:
    """A replica's share in the cluster's KV cache. Built after the engine, before the first request."""

    def __init__(
        self,
        thread: EngineLoop,
        config: VllmConfig,
        settings: Settings,
        port: KVPort,
        fingerprint: bytes,
        replica: str,
    ) -> None:
        self._thread = thread
        self._config = config
        self.call = thread.call
        scheduler = self._scheduler = self.scheduler = thread.scheduler
        self._manager = scheduler.kv_cache_manager
        worker_connector = get_kv_transfer_group()
        scheduler_connector = scheduler.connector
        assert isinstance(worker_connector, CrossKVConnector)
        assert isinstance(scheduler_connector, CrossKVConnector)
        layers = layer_tensors(worker_connector.kv_caches)
        block_size = config.cache_config.block_size
        layout = _layout(config, layers[0])
        self.copier = SegmentCopier([layer.view(layout.dtype) for layer in layers], layout, fingerprint)
        _check_segments(self.copier, settings.kv.segment_tokens)
        ends = group_ends(len(layers), settings.kv.layerwise.layers_per_group(len(layers)))
        buffer_bytes = layerwise_buffer_bytes(settings, self.copier, ends, config.model_config.max_model_len)
        self.copier.warm_up()
        pool = self._manager.block_pool
        pool_blocks = pool.num_gpu_blocks
        rates = MeasuredRates()
        self.transfer = KVTransfer(
            self.copier,
            port,
            max_held_blocks=int(pool_blocks * HELD_POOL_SHARE),
            blocks_per_segment=settings.kv.segment_tokens // block_size,
            load_deadline_s=settings.kv.load_deadline_s,
            on_rate=rates.add,
            on_load_end=thread.wake,
            streams=streams_for(layers[0]),
        )
        choice = LayerwiseChoice(settings.kv.layerwise, port, rates, self.copier.block_bytes, ends)
        self.layerwise = LayerwiseStep(
            self.copier,
            self.transfer,
            choice,
            rates,
            ends,
            streams_for(layers[0]),
            buffer_bytes,
            saves=settings.kv.layerwise.saves(layers[0].is_cuda),
            on_wait=thread.heartbeat.may_wait,
        )
        model = thread.call(partial(model_to_blend, config, thread.runner, pool, self.copier)).result()
        calibrated = read_blend_profile(settings.model_source)
        self.blends = Blends(
            settings.blending,
            model,
            self.transfer,
            self.copier,
            port,
            thread.call,
            lambda: len(scheduler.running),
            int(pool_blocks * HELD_POOL_SHARE),
            calibrated.check_layer if calibrated else None,
            steps.slice_s if (steps := steps_of(scheduler)) else lambda: None,
        )
        self._scheduler_side = SchedulerSide(
            port=port,
            transfer=self.transfer,
            kv_cache_manager=self._manager,
            block_size=block_size,
            blocks_per_segment=settings.kv.segment_tokens // block_size,
            replica=replica,
            on_engine_thread=thread.call,
            layerwise=self.layerwise,
            blends=self.blends,
            num_running=lambda: len(scheduler.running),
            max_step_tokens=lambda: scheduler.max_num_scheduled_tokens,
            load_deadline_s=settings.kv.load_deadline_s,
            make_room=self.transfer.drop_waiting_saves,
            ttft_target_s=settings.kv.ttft_target_s,
        )
        publisher = PlacementPublisher(port, self._in_pool, self._on_cleared)
        self._scheduler_side.owners = publisher.owners
        publisher.owners.find = self._scheduler_side.owner_of_block
        self.control = PoolControl(
            pool=pool,
            transfer=self.transfer,
            block_size=block_size,
            parents=publisher.parents,
            owners=publisher.owners,
            publish=self._publish_events,
            on_engine_thread=thread.call,
        )

        self.kept = self._scheduler_side.kept
        self.kept.control = self.control
        self.usage = {**self.control.usage(), "wanted_blocks": 0}
        """`pool_usage` at the end of the engine's last step, and what its queue waits for: for anyone to read, at once,
        whatever the engine does."""

        def note_usage() -> None:
            usage = self.control.usage()
            self.usage = {**usage, "wanted_blocks": wanted_blocks(scheduler, usage["free_blocks"])}

        def attach() -> None:
            thread.on_turn = note_usage
            scheduler_connector.attach(self._scheduler_side, self.transfer, self.layerwise)
            worker_connector.attach(None, self.transfer, self.layerwise)
            scheduler.kv_event_publisher = publisher

        thread.call(attach).result()
        self.order_device(settings.kv.device_policy == "hotness").result()
        self.sparse_budgets = self._begin_sparse(settings, fingerprint)
        """What is kept of tolerant prompts' KV in Redis, and presented here; None: all."""

    def _begin_sparse(self, settings: Settings, fingerprint: bytes) -> Budgets | None:
        if settings.kv.sparse == OFF:
            return None
        coding = sparse_coding(settings, fingerprint)
        budgets = coding.budgets(len(self.copier.layers))
        if budgets is None:
            return None
        why = self.accept_sparse(opener(coding, self.copier))
        if why is not None:
            logger.warning("KV is stored dense, for this engine cannot present it sparse: %s", why)
            return None
        worker: Any = get_kv_transfer_group()

        def watch() -> None:
            runner = self._thread.runner
            layers = runner.compilation_config.static_forward_context
            names = layer_names(worker.kv_caches)
            self._scheduler_side.saves.queries = QueryWatch(runner, [layers[name] for name in names])

        self._thread.call(watch).result()
        return budgets

    def accept_sparse(self, open_kept: OpenKept) -> str | None:
        """Present sparse prefixes from now on, opened by `open_kept`. Returns why the engine cannot, if it cannot."""
        runner = self._thread.runner
        why = why_not(self._config) or why_not_built(runner)
        if why is not None:
            return why
        worker: Any = get_kv_transfer_group()
        names = layer_names(worker.kv_caches)
        block_size = self._config.cache_config.block_size
        presenter = SparsePresenter(runner, names, block_size)
        slots = RetainedSlots(self.copier.layers, self.copier.layout)
        sparse = SparseRequests(presenter, slots, open_kept, self.control, block_size, self.transfer.count_sparse_lost)

        def accept() -> None:
            self._scheduler_side.sparse, self.control.is_never_saved = sparse, sparse.is_root

        self._thread.call(accept).result()
        return None

    def order_device(self, by_hotness: bool) -> Future[None]:
        """Choose the order in which device blocks go: coldest first, or vLLM's own. Scores start over."""

        def order() -> None:
            pool = self._manager.block_pool
            queue = order_by_hotness(pool) if by_hotness else None
            if queue is None:
                order_by_recency(pool)
            self._scheduler_side.queue = self.control.queue = queue

        return self._thread.call(order)

    def tell_device(self, tell: Callable[[list[bytes]], None]) -> Future[None]:
        """Call `tell`, on the engine thread, with every block hash in the pool: no change is reported meanwhile."""
        return self._thread.call(lambda: tell(self.control.cached_hashes()))

    def device_hashes(self) -> Future[list[bytes]]:
        """Every block hash in the device pool."""
        return self._thread.call(self.control.cached_hashes)

    def clear_device(self, tenant: str | None = None) -> Future[int]:
        """Empty the device's prefix cache, or of a tenant's blocks; returns how many. Running requests keep theirs.

        In slices, each a call to the engine thread: the engine steps in between.
        """
        done: Future[int] = Future()

        def call(first: int, cleared: int) -> None:
            self._thread.call(partial(self.control.clear, tenant, first)).add_done_callback(partial(go_on, cleared))

        def go_on(cleared: int, ended: Future[tuple[int, int]]) -> None:
            if (error := ended.exception()) is not None:
                done.set_exception(error)
                return
            blocks, following = ended.result()
            if following:
                call(following, cleared + blocks)
            else:
                done.set_result(cleared + blocks)

        call(0, 0)
        return done

    def pool_usage(self) -> Future[dict[str, int]]:
        """Device blocks now: all, free, cached. All but the null block are free if no request uses any."""
        return self._thread.call(self.control.usage)

    def close(self) -> None:
        """End the transfer threads."""
        self.transfer.close()

    def _in_pool(self, block_hash: Any) -> bool:
        return self._manager.block_pool.get_cached_block(block_hash, [0]) is not None

    def _on_cleared(self) -> None:
        if self.control.queue is not None:
            self.control.queue.all_emptied()

    def _publish_events(self) -> None:
        """vLLM publishes at the end of a step; after a change between steps it is for us to do."""
        events = self._manager.take_events()
        if events:
            self._scheduler.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=events))


def _check_segments(copier: SegmentCopier, segment_tokens: int) -> None:
    """Say that segments are large. Raises SettingsError where they cannot be stored."""
    try:
        num_blocks = segment_tokens // copier.layout.block_size
        said = check_segment_bytes(copier.sealed_bytes(num_blocks), segment_tokens, num_blocks)
    except ValueError as error:
        raise SettingsError(f"{error}.") from None
    if said is not None:
        logger.warning("%s", said)


def layerwise_buffer_bytes(settings: Settings, copier: SegmentCopier, ends: Sequence[int], max_tokens: int) -> int:
    """The layerwise buffer. Raises SettingsError for one that does not hold a group of layers of the longest prompt."""
    layerwise = settings.kv.layerwise
    least = group_bytes(copier.block_bytes, ends, -(-max_tokens // copier.layout.block_size))
    buffer_bytes = layerwise.buffer_for(least)
    if layerwise.enabled != "off" and buffer_bytes < least:
        group = layerwise.layers_per_group(len(copier.layers))
        raise SettingsError(
            f"kv.layerwise.buffer_bytes: {buffer_bytes} bytes do not hold {group} layers of the longest "
            f"prompt, {max_tokens} tokens; use at least {least}, a smaller kv.layerwise.group_layers, or set "
            f"kv.layerwise.enabled to off"
        )
    return buffer_bytes


def _layout(config: VllmConfig, layer: torch.Tensor) -> PagedLayout:
    """The layout of vLLM's cache tensors. Raises ValueError for one that no test holds to vLLM's own."""
    model, block_size = config.model_config, config.cache_config.block_size
    heads, dim = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype in FP8_KV:
        if not current_platform.is_cpu():
            raise ValueError(f"its KV cache is kept as {cache_dtype}, which no test has moved on this platform")
        return PagedLayout(LayoutKind.OPAQUE, block_size, heads, dim, torch.uint8)
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(layer.dtype, block_size, dim, cache_dtype)
        return cpu_layout_for(isa, block_size, heads, dim, layer.dtype)
    return PagedLayout(LayoutKind.CUDA_FLASH, block_size, heads, dim, layer.dtype)
