"""Paged gather and scatter: blocks lie in random order in a pool, and a run goes through the whole pool.

On the CPU whole segments, and the same a layer at a time as layerwise transfer does it. On a GPU Triton's version and
torch's indexing, compared with a copy within the device: cache and segments are both there, and the time is the
device's, between two events.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.benchmark.measuring import Case, Target
from kernels.paged.gather_scatter import gather, scatter
from kernels.paged.index import gather_index, scatter_index
from kernels.paged.layout import LayoutKind, PagedLayout

FAMILIES = ("gather", "scatter")
SEGMENT_TOKENS = 256
BLOCK_SIZE = 32
POOL_BYTES = 192 * 2**20  # of KV in the pool, and again in segments; a server's last-level cache is 32 MB or so
Move = Callable[[Sequence[torch.Tensor], Sequence[int], PagedLayout, torch.Tensor], None]
DEVICE_BLOCK_SIZE = 16
DEVICE_POOL_BYTES = 2**30  # a GPU's cache is 50 MB or so
TARGET = Target("ratio", 0.5)


@dataclass(frozen=True)
class Model:
    """The KV shape of a model: what one token costs is ``2 * num_layers * num_kv_heads * head_dim`` elements."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


MODELS = (Model("demo", 6, 2, 64), Model("0.5B", 24, 2, 64))


@dataclass(frozen=True)
class Placements:
    """Segments, and the blocks of the pool that hold each."""

    layout: PagedLayout
    layers: list[torch.Tensor]
    segments: list[torch.Tensor]
    block_ids: list[list[int]]

    @property
    def nbytes(self) -> int:
        """Of all segments."""
        return len(self.segments) * self.segments[0].nbytes


def place(model: Model, layout: PagedLayout, pool_bytes: int, device: str = "cpu") -> Placements:
    """Segments of ``pool_bytes`` together, at least two, and a pool that holds them."""
    blocks_per_segment = SEGMENT_TOKENS // layout.block_size
    shape = layout.segment_shape(model.num_layers, blocks_per_segment)
    num_segments = max(2, pool_bytes // (torch.Size(shape).numel() * layout.dtype.itemsize))
    pool_shape = (num_segments * blocks_per_segment, *layout.block_shape)
    layers = [torch.ones(pool_shape, dtype=layout.dtype, device=device) for _ in range(model.num_layers)]
    segments = [torch.ones(shape, dtype=layout.dtype, device=device) for _ in range(num_segments)]
    order = torch.randperm(pool_shape[0], generator=torch.Generator().manual_seed(0))
    return Placements(layout, layers, segments, order.view(num_segments, -1).tolist())


def paged_cases(families: set[str], pool_bytes: int = POOL_BYTES) -> Iterator[Case]:
    """Every model on both CPU layouts. One model's memory is free again when the next one's cases are asked for."""
    for model, kind in itertools.product(MODELS, (LayoutKind.CPU_VEC, LayoutKind.CPU_AMX)):
        layout = PagedLayout(kind, BLOCK_SIZE, model.num_kv_heads, model.head_dim, torch.bfloat16)
        placements = place(model, layout, pool_bytes)
        for move in (gather, scatter):
            if move.__name__ not in families:
                continue
            for group, label in ((model.num_layers, "whole segments"), (1, "a layer a call")):
                yield Case(
                    family=move.__name__,
                    name=f"{move.__name__}, {model.name} {kind.value}, {label}",
                    amount=placements.nbytes,
                    calls=len(placements.segments) * model.num_layers // group,
                    run=partial(move_all, move, placements, group),
                    copy=partial(_copy_all, placements),
                    target=TARGET if group == model.num_layers else None,
                )


def move_all(move: Move, placements: Placements, group_layers: int) -> None:
    """Gather or scatter every segment, ``group_layers`` layers a call."""
    layers, layout = placements.layers, placements.layout
    for block_ids, segment in zip(placements.block_ids, placements.segments, strict=True):
        if group_layers == len(layers):
            move(layers, block_ids, layout, segment)
            continue
        for first in range(0, len(layers), group_layers):
            group = slice(first, first + group_layers)
            move(layers[group], block_ids, layout, segment[group])


def _copy_all(placements: Placements) -> None:
    segments = placements.segments
    for source, target in zip(segments, segments[len(segments) // 2 :] + segments, strict=False):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def device_seconds(operation: Callable[[], None]) -> float:
    """Time between two events around ``operation``, on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    operation()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def device_cases(families: set[str]) -> Iterator[Case]:
    """Every model in both of vLLM's memory orders."""
    from kernels.paged.triton import gather_triton, scatter_triton

    moves: tuple[tuple[str, str, Move], ...] = (
        ("gather", "Triton", gather_triton),
        ("gather", "index", gather_index),
        ("scatter", "Triton", scatter_triton),
        ("scatter", "index", scatter_index),
    )
    for model, order in itertools.product(MODELS, ("NHD", "HND")):
        heads, dim = model.num_kv_heads, model.head_dim
        layout = PagedLayout(LayoutKind.CUDA_FLASH, DEVICE_BLOCK_SIZE, heads, dim, torch.bfloat16)
        placements = place(model, layout, DEVICE_POOL_BYTES, "cuda")
        if order == "NHD":
            layers = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in placements.layers]
            placements = replace(placements, layers=layers)
        for family, version, move in moves:
            if family in families:
                yield Case(
                    family=family,
                    name=f"{family} on the GPU, {model.name} {order}, {version}",
                    amount=placements.nbytes,
                    calls=len(placements.segments),
                    run=partial(move_all, move, placements, model.num_layers),
                    copy=partial(_copy_on_device, placements),
                )


def _copy_on_device(placements: Placements) -> None:
    segments = placements.segments
    for source, target in zip(segments, segments[len(segments) // 2 :] + segments, strict=False):
        target.copy_(source)
