"""Wires one replica's engine to the shared KV cache: connector, transfer threads, port, placement events.

The one place that reaches into a built engine: `EngineCore.scheduler.connector`, `Scheduler.kv_cache_manager`,
`Scheduler.kv_event_publisher`, the model runner, `KVCacheManager.allocate_slots` (and that a request which it gives
nothing is preempted only then), `get_kv_transfer_group`, `BlockPool`, and, for the layout of the CPU backend's cache,
`vllm.v1.attention.backends.cpu_attn._get_attn_isa`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from configs.settings import Settings, SettingsError
from deployments.engine.checks import FP8_KV
from deployments.engine.connector import CrossKVConnector, PreemptionHooks, layer_names, layer_tensors
from deployments.engine.groups import KVGroups
from deployments.engine.held_states import HeldStates, StateSaves
from deployments.engine.held_windows import HeldWindows, WindowSaves
from deployments.engine.load_paths.parts import EngineLoop, EngineParts, build_paths
from deployments.engine.load_paths.whole import WholePath
from deployments.engine.pool.block_owners import Owner
from deployments.engine.pool.control import PoolControl
from deployments.engine.pool.events import PlacementPublisher
from deployments.engine.request_saves import DenseSaves, RequestSaves
from deployments.engine.request_scores import RequestScores
from deployments.engine.scheduler_side import SchedulerSide
from deployments.engine.scheduling.wanted_blocks import wanted_blocks
from deployments.protocol.kv_port import KVPort
from deployments.transfer.held_save import HeldSaves
from deployments.transfer.layerwise_choice import LayerwiseChoice, MeasuredRates, group_bytes, group_ends
from deployments.transfer.layerwise_step import LayerwiseStep
from deployments.transfer.layerwise_streams import streams_for
from deployments.transfer.segment_copy import SegmentCopier, state_copier
from deployments.transfer.threads import KVTransfer
from kernels.paged.layout import LayoutKind, PagedLayout, cpu_layout_for
from kvmanager.moves.plan import LANDINGS
from kvmanager.segments.sizes import check_segment_bytes

logger = logging.getLogger(__name__)

HELD_POOL_SHARE = 0.5
"""Largest share of the device pool that saves in flight may hold, and another one for requests of a path that wait.

What is beyond is not saved, or computed: others are to have room."""
HELD_WINDOWS_SHARE = 0.25
"""Largest share of the device pool that is held of windows until it may be saved."""
LEAST_LAYERWISE_BYTES = 256 * 1024**2
"""Of host memory for KV that moves layer by layer; a group of layers of the longest prompt may need more."""


def why_not_moved(loop: EngineLoop, config: VllmConfig, settings: Settings) -> str | None:
    """A sentence where the KV of an engine that is built with the connector cannot be moved; None where it can."""
    connector = loop.scheduler.connector
    if connector.unsupported is not None:
        return str(connector.unsupported)
    if not connector.groups.is_plain and not current_platform.is_cpu():
        return "the model attends to windows or has states, which no test has moved on this platform"
    if (why := _why_otherwise(connector.groups, config, settings)) is not None:
        return why
    ranks = config.parallel_config.world_size
    if ranks > 1 and len(connector.rank_caches) != ranks:
        return "a layer's KV does not lie where vLLM says, so the ranks' processes cannot share it; their logs name it"
    caches = _caches(connector)[0]
    try:
        _layout(config, layer_tensors(_token_caches(caches, connector.groups))[0])
        _states(caches, connector.groups, b"")
    except ValueError as error:
        return str(error)
    return None


def _why_otherwise(groups: KVGroups, config: VllmConfig, settings: Settings) -> str | None:
    """Why states, or latents, of which vLLM chooses the blocks, are not moved; None: they are, or there are none."""
    if not groups.states and not groups.latents:
        return None
    what = "states" if groups.states else "latents (MLA)"
    block, named = config.cache_config.block_size, settings.block_size_tokens
    if block != named:
        return (
            f"the model has {what}, which vLLM keeps in blocks of {block} tokens, and prompts are named in blocks of "
            f"{named}: set engine.block_size_tokens to {block}, and kv.segment_tokens to a multiple of it"
        )
    if groups.states and "states" not in settings.kv.load_paths:
        return "the model has states, and kv.load_paths leaves `states` out"
    return None


class KVReuse:
    """A replica's share in the cluster's KV cache. Built after the engine, before the first request."""

    def __init__(
        self,
        loop: EngineLoop,
        config: VllmConfig,
        settings: Settings,
        port: KVPort,
        fingerprint: bytes,
        replica: str,
    ) -> None:
        self._loop = loop
        self.call = loop.call
        self.scheduler = loop.scheduler
        self._manager = self.scheduler.kv_cache_manager
        connector: CrossKVConnector = self.scheduler.connector
        groups = self._groups = connector.groups
        ranks = [_token_caches(caches, groups) for caches in _caches(connector)]
        self._ranks = len(ranks)
        # A segment's sections are by rank, then layer.
        layers = [layer for caches in ranks for layer in layer_tensors(caches)]
        names = layer_names(ranks[0])
        block_size = config.cache_config.block_size
        layout = _layout(config, layers[0])
        one_table = groups.is_plain or bool(groups.states)
        self.copier = SegmentCopier(
            [layer.view(layout.dtype) for layer in layers],
            layout,
            fingerprint,
            () if one_table else groups.runs(names),
        )
        self.states = _states(_caches(connector)[0], groups, fingerprint)
        """What copies the states of a model that has any."""
        _check_segments(self.copier, settings.kv.segment_tokens)
        max_held_blocks = int(self._manager.block_pool.num_gpu_blocks * HELD_POOL_SHARE / len(groups.windows))
        self._build_transfer(settings, port, max_held_blocks, config.model_config.max_model_len)
        publisher = PlacementPublisher(port, self._in_pool, self._on_cleared, self._owner_of_block, groups.main)
        self.control = PoolControl(
            pool=self._manager.block_pool,
            transfer=self.transfer,
            block_size=block_size,
            parents=publisher.parents,
            owners=publisher.owners,
            publish=self._publish_events,
            on_engine_thread=loop.call,
            group=groups.main,
            has_windows=not groups.is_plain,
        )
        self.saves, of_tokens = self._build_saves(block_size, settings.kv.segment_tokens // block_size)
        self._scores = RequestScores(self._manager, block_size)
        parts = EngineParts(
            loop=loop,
            config=config,
            settings=settings,
            fingerprint=fingerprint,
            layer_names=names,
            ranks=self._ranks,
            groups=groups,
            block_size=block_size,
            max_held_blocks=max_held_blocks,
            port=port,
            copier=self.copier,
            transfer=self.transfer,
            layerwise=self.layerwise,
            control=self.control,
            saves=of_tokens,
            states=self.states,
            scores=self._scores,
            whole=WholePath(
                self.transfer,
                block_size,
                settings.kv.load_deadline_s,
                settings.kv.ttft_target_s,
                has_windows=not groups.is_plain,
            ),
        )
        self.paths: Mapping[str, Any] = build_paths(parts)
        """By name, in the order in which they are asked."""
        self.terms = {name: path.terms for name, path in self.paths.items() if path.terms is not None}
        """What plans must say for a path, by its name."""
        if not groups.is_plain:
            self.terms[LANDINGS] = True
        self._scheduler_side = SchedulerSide(
            port=port,
            transfer=self.transfer,
            paths=list(self.paths.values()),
            saves=self.saves,
            scores=self._scores,
            owners=publisher.owners,
            block_size=block_size,
            replica=replica,
            load_deadline_s=settings.kv.load_deadline_s,
        )
        self.usage = {**self.control.usage(), "wanted_blocks": 0}
        """`PoolControl.usage` at the end of the engine's last step, and what its queue waits for. From any thread."""
        loop.call(partial(self._attach, publisher)).result()
        self.order_device(settings.kv.device_policy == "hotness").result()

    def _build_saves(self, block_size: int, blocks_per_segment: int) -> tuple[RequestSaves, DenseSaves]:
        """Return the saves of the model's kind, and those of its tokens' blocks."""
        groups, manager = self._groups, self._manager
        most_blocks = int(manager.block_pool.num_gpu_blocks * HELD_WINDOWS_SHARE)
        held_saves = HeldSaves(manager.block_pool, self.transfer, self.call)
        tools = manager, held_saves, self.layerwise, block_size, blocks_per_segment
        if groups.is_plain:
            plain = DenseSaves(*tools)
            return plain, plain
        if self.states is None:
            windows = WindowSaves(*tools, HeldWindows(manager, groups, block_size, most_blocks))
            return windows, windows
        tokens = DenseSaves(*tools, groups.main)
        held = HeldStates(manager, groups.states, block_size, most_blocks)
        return StateSaves(tokens, held, self.states, held_saves, block_size), tokens

    def _build_transfer(self, settings: Settings, port: KVPort, max_held_blocks: int, max_tokens: int) -> None:
        """Make what copies: transfer threads, and what goes layer by layer. Raises SettingsError."""
        copier, layers, kv = self.copier, self.copier.layers, settings.kv
        ends = group_ends(len(layers), kv.layerwise.layers_per_group(len(layers)))
        longest = group_bytes(copier.block_bytes, ends, -(-max_tokens // copier.layout.block_size))
        copier.warm_up()
        rates = MeasuredRates()
        self.transfer = KVTransfer(
            copier,
            port,
            max_held_blocks=max_held_blocks,
            blocks_per_segment=kv.segment_tokens // copier.layout.block_size,
            load_deadline_s=kv.load_deadline_s,
            on_rate=rates.add,
            on_load_end=self._loop.wake,
            streams=streams_for(layers[0]),
        )
        self.layerwise = LayerwiseStep(
            copier,
            self.transfer,
            LayerwiseChoice(kv.layerwise, port, rates, copier.block_bytes, ends),
            rates,
            ends,
            streams_for(layers[0]),
            max(longest, LEAST_LAYERWISE_BYTES),
            saves=self._groups.has_layers_alone and self._ranks == 1 and kv.layerwise.saves(layers[0].is_cuda),
            on_wait=self._loop.heartbeat.may_wait,
        )

    def _attach(self, publisher: PlacementPublisher) -> None:
        """Put all of it in its place. On the engine thread."""
        connector = self.scheduler.connector
        assert isinstance(connector, CrossKVConnector)
        self._loop.on_turn = self._note_usage
        preemption: PreemptionHooks | None = self.paths.get("preempted")
        if self._ranks == 1:
            worker = get_kv_transfer_group()
            assert isinstance(worker, CrossKVConnector)
            connector.attach(self._scheduler_side, self.transfer, self.layerwise, preemption)
            worker.attach(None, self.transfer, self.layerwise)
        else:
            connector.attach(self._scheduler_side, self.transfer, None, preemption)
        self.scheduler.kv_event_publisher = publisher

    def order_device(self, by_hotness: bool) -> Future[None]:
        """Choose the order in which device blocks go (`PoolControl.order`)."""
        return self._loop.call(lambda: self._scores.order_by(self.control.order(by_hotness)))

    def tell_device(self, tell: Callable[[list[bytes]], None]) -> Future[None]:
        """Call `tell`, on the engine thread, with every block hash in the pool: no change is reported meanwhile."""
        return self._loop.call(lambda: tell(self.control.cached_hashes()))

    def clear_device(self, tenant: str | None = None) -> Future[int]:
        """Empty the device's prefix cache, or of a tenant's blocks; returns how many. Running requests keep theirs.

        In slices, each a call to the engine thread: the engine steps in between.
        """
        done: Future[int] = Future()

        def call(first: int, cleared: int) -> None:
            self._loop.call(partial(self.control.clear, tenant, first)).add_done_callback(partial(go_on, cleared))

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

    def close(self) -> None:
        """End the transfer threads."""
        self.transfer.close()

    def _note_usage(self) -> None:
        usage = self.control.usage()
        self.usage = {**usage, "wanted_blocks": wanted_blocks(self.scheduler, usage["free_blocks"])}

    def _owner_of_block(self, block_hash: bytes) -> Owner:
        return self._scheduler_side.owner_of_block(block_hash)

    def _in_pool(self, block_hash: Any) -> bool:
        return self._manager.block_pool.get_cached_block(block_hash, [self._groups.main]) is not None

    def _on_cleared(self) -> None:
        if self.control.queue is not None:
            self.control.queue.all_emptied()

    def _publish_events(self) -> None:
        """vLLM publishes at the end of a step; after a change between steps it is for us to do."""
        events = self._manager.take_events()
        if events:
            self.scheduler.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=events))


def _caches(connector: CrossKVConnector) -> Sequence[Mapping[str, Any]]:
    """By rank, what vLLM has registered, by layer name."""
    if connector.rank_caches:
        return connector.rank_caches
    worker: Any = get_kv_transfer_group()
    return [worker.kv_caches]


def _token_caches(kv_caches: Mapping[str, Any], groups: KVGroups) -> dict[str, torch.Tensor]:
    """What vLLM has registered of the layers that keep KV of tokens."""
    return {name: cache for name, cache in kv_caches.items() if groups.group_of.get(name) not in groups.states}


def _states(kv_caches: Mapping[str, Any], groups: KVGroups, fingerprint: bytes) -> SegmentCopier | None:
    """What copies the states; None for a model without. Raises ValueError for such as cannot be moved."""
    caches = {name: cache for name, cache in kv_caches.items() if groups.group_of.get(name) in groups.states}
    if not caches:
        return None
    names = layer_names(caches)
    return state_copier([caches[name] for name in names], groups.runs(names), fingerprint)


def _check_segments(copier: SegmentCopier, segment_tokens: int) -> None:
    """Say that segments are large. Raises SettingsError where they cannot be stored."""
    try:
        num_blocks = segment_tokens // copier.layout.block_size
        said = check_segment_bytes(copier.sealed_bytes(num_blocks), segment_tokens, num_blocks)
    except ValueError as error:
        raise SettingsError(f"{error}.") from None
    if said is not None:
        logger.warning("%s", said)


def _layout(config: VllmConfig, layer: torch.Tensor) -> PagedLayout:
    """The layout of vLLM's cache tensors. Raises ValueError for one that no test holds to vLLM's own."""
    layout = _layout_of(config, layer)
    if tuple(layer.shape[1:]) != layout.block_shape:
        raise ValueError(f"its cache has blocks of {tuple(layer.shape[1:])}, and not of {layout.block_shape} elements")
    return layout


def _layout_of(config: VllmConfig, layer: torch.Tensor) -> PagedLayout:
    model, block_size = config.model_config, config.cache_config.block_size
    heads, dim = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype in FP8_KV:
        if not current_platform.is_cpu():
            raise ValueError(f"its KV cache is kept as {cache_dtype}, which no test has moved on this platform")
        return PagedLayout(LayoutKind.OPAQUE, block_size, heads, dim, torch.uint8)
    if model.use_mla:
        return PagedLayout(LayoutKind.LATENT, block_size, heads, dim, layer.dtype)
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(layer.dtype, block_size, dim, cache_dtype)
        return cpu_layout_for(isa, block_size, heads, dim, layer.dtype)
    return PagedLayout(LayoutKind.CUDA_FLASH, block_size, heads, dim, layer.dtype)
