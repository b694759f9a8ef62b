"""Wires one replica's engine to the shared KV cache: connector, transfer threads, port, placement events.

The one place that reaches into a built engine (vllm 0.32.0): `EngineCore.scheduler.connector`,
`Scheduler.kv_cache_manager`, `Scheduler.kv_event_publisher`, `get_kv_transfer_group`, `BlockPool`, and, for the layout
of the CPU backend's cache, `vllm.v1.attention.backends.cpu_attn._get_attn_isa`.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from configs.settings import Settings
from deployments.connector import CrossKVConnector, layer_tensors
from deployments.connector_scheduler import SchedulerSide
from deployments.device_events import PlacementPublisher
from deployments.engine_host import EngineThread
from deployments.kv_port import KVPort
from deployments.kv_transfer import KVTransfer
from deployments.segment_copy import SegmentCopier
from kernels.layout import LayoutKind, PagedLayout, cpu_layout_for

HELD_POOL_SHARE = 0.5
"""Largest share of the device pool that saves in flight may hold; what is beyond is not saved."""


class KVReuse:
    """A replica's share in the cluster's KV cache. Built after the engine, before the first request."""

    def __init__(
        self,
        thread: EngineThread,
        config: VllmConfig,
        settings: Settings,
        port: KVPort,
        fingerprint: bytes,
        replica: str,
    ) -> None:
        self._thread = thread
        scheduler: Any = thread.core.scheduler
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        worker_connector = get_kv_transfer_group()
        scheduler_connector = scheduler.connector
        assert isinstance(worker_connector, CrossKVConnector)
        assert isinstance(scheduler_connector, CrossKVConnector)
        layers = layer_tensors(worker_connector.kv_caches)
        block_size = config.cache_config.block_size
        self.copier = SegmentCopier(layers, _layout(config, layers[0]), fingerprint)
        self.copier.warm_up()
        pool_blocks = self._manager.block_pool.num_gpu_blocks
        self.transfer = KVTransfer(
            self.copier,
            port,
            max_held_blocks=int(pool_blocks * HELD_POOL_SHARE),
            load_deadline_s=settings.kv.load_deadline_s,
        )
        scheduler_side = SchedulerSide(
            port=port,
            transfer=self.transfer,
            kv_cache_manager=self._manager,
            block_size=block_size,
            blocks_per_segment=settings.kv.segment_tokens // block_size,
            save_answers=settings.kv.save_answers,
            replica=replica,
            on_engine_thread=thread.call,
        )

        def attach() -> None:
            scheduler_connector.attach(scheduler_side, self.transfer)
            worker_connector.attach(None, self.transfer)
            scheduler.kv_event_publisher = PlacementPublisher(port, self._in_pool)

        thread.call(attach).result()

    def device_hashes(self) -> Future[list[bytes]]:
        """Every block hash in the device pool."""
        return self._thread.call(lambda: list(dict.fromkeys(block.block_hash[:32] for block in self._cached_blocks())))

    def clear_device(self) -> Future[int]:
        """Empty the device's prefix cache; returns the number of blocks that it held. Running requests keep theirs."""

        def clear() -> int:
            blocks = {block.block_id for block in self._cached_blocks()}
            self._manager.block_pool.evict_blocks(blocks)
            self._publish_events()
            return len(blocks)

        return self._thread.call(clear)

    def pool_usage(self) -> Future[dict[str, int]]:
        """Device blocks: all, free, cached. After the last request and save `free` is `all` minus the null block."""

        def usage() -> dict[str, int]:
            pool = self._manager.block_pool
            return {
                "blocks": pool.num_gpu_blocks,
                "free_blocks": pool.get_num_free_blocks(),
                "cached_blocks": sum(1 for _ in self._cached_blocks()),
            }

        return self._thread.call(usage)

    def close(self) -> None:
        """End the transfer threads."""
        self.transfer.close()

    def _cached_blocks(self) -> Any:
        return (block for block in self._manager.block_pool.blocks if block.block_hash is not None)

    def _in_pool(self, block_hash: Any) -> bool:
        return self._manager.block_pool.get_cached_block(block_hash, [0]) is not None

    def _publish_events(self) -> None:
        """vLLM publishes at the end of a step; after a change between steps it is for us to do."""
        events = self._manager.take_events()
        if events:
            self._scheduler.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=events))


def _layout(config: VllmConfig, layer: torch.Tensor) -> PagedLayout:
    """The layout of vLLM's cache tensors. Raises ValueError for one that no test holds to vLLM's own."""
    model, block_size = config.model_config, config.cache_config.block_size
    heads, dim = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(layer.dtype, block_size, dim, config.cache_config.cache_dtype)
        return cpu_layout_for(isa, block_size, heads, dim, layer.dtype)
    return PagedLayout(LayoutKind.CUDA_FLASH, block_size, heads, dim, layer.dtype)
