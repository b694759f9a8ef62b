"""The KV caches of a tensor-parallel engine's ranks, mapped into the process that moves KV.

Each rank is a process of vLLM's own and keeps the KV of its share of the heads. It moves its cache into shared memory
as vLLM hands it to the connector (`share_caches`), and says where that is by vLLM's handshake between the connector's
halves. The engine's process maps the same pages (`map_caches`) and moves KV for all ranks: one plan, one segment, one
verification, so no set of shards can be partial.

The memory has no name. The kernel frees it when the last process that maps it has ended, however it ended.

Leans on vLLM: `KVConnectorHandshakeMetadata`; that attention layers read the very tensor that is registered
(`AttentionLayerBase.bind_kv_cache`), which `share_caches` looks at.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata


@dataclass(frozen=True, slots=True)
class _View:
    """A layer's tensor; `offset`, `shape` and `stride` in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SharedCaches(KVConnectorHandshakeMetadata):
    """Where a rank's KV cache lies: file `fd` of process `pid`, `nbytes` long. It can be pickled."""

    pid: int
    fd: int
    nbytes: int
    views: Mapping[str, _View]
    """By layer name."""


def share_caches(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> SharedCaches:
    """Move a rank's tensors into shared memory of zeros, in place. `layers`: vLLM's, by the names of their caches.

    In the rank's process, before anything is computed; what the tensors held is lost. The file stays open for the
    process's life. Raises ValueError where a layer keeps another tensor than the registered one; nothing is moved then.
    """
    places: dict[int, int] = {}
    nbytes = 0
    for name, cache in kv_caches.items():
        if getattr(layers.get(name), "kv_cache", None) is not cache:
            raise ValueError(f"layer {name} keeps a view of its own of its KV, which does not move with it")
        storage = cache.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = nbytes
            nbytes += -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.memfd_create("crosskv-kv")
    os.ftruncate(fd, nbytes)
    memory = _map(fd, nbytes).untyped_storage()
    views: dict[str, _View] = {}
    for name, cache in kv_caches.items():
        offset = places[cache.untyped_storage().data_ptr()] // cache.itemsize + int(cache.storage_offset())
        views[name] = _View(cache.dtype, tuple(cache.shape), cache.stride(), offset)
    with torch.inference_mode():  # vLLM may have made them in it
        for name, view in views.items():  # when no place is needed any more: two layers may share a storage
            kv_caches[name].set_(memory, view.offset, view.shape, view.stride)
    return SharedCaches(os.getpid(), fd, nbytes, views)


def map_caches(shared: SharedCaches) -> dict[str, torch.Tensor]:
    """Return a rank's tensors, by layer name, as views of the same memory. In the process that moves KV.

    Raises OSError where the rank's process has ended, or its files cannot be opened.
    """
    fd = os.open(f"/proc/{shared.pid}/fd/{shared.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = _map(fd, shared.nbytes)
    finally:
        os.close(fd)
    return {
        name: torch.as_strided(memory.view(view.dtype), view.shape, view.stride, view.offset)
        for name, view in shared.views.items()
    }


def _map(fd: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
