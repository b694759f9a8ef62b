"""Paged gather and scatter on a GPU: Triton's version and torch's indexing, compared with a copy within the device.

Cache and segments are both on the device; the time is the device's, between two events.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from kernels.benchmark.measuring import Case
from kernels.benchmark.paged_cases import MODELS, Move, Placements, move_all, place
from kernels.paged.index import gather_index, scatter_index
from kernels.paged.layout import LayoutKind, PagedLayout

BLOCK_SIZE = 16
POOL_BYTES = 2**30  # a GPU's cache is 50 MB or so


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
        layout = PagedLayout(LayoutKind.CUDA_FLASH, BLOCK_SIZE, model.num_kv_heads, model.head_dim, torch.bfloat16)
        placements = place(model, layout, POOL_BYTES, "cuda")
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
                    copy=partial(_copy_all, placements),
                )


def _copy_all(placements: Placements) -> None:
    segments = placements.segments
    for source, target in zip(segments, segments[len(segments) // 2 :] + segments, strict=False):
        target.copy_(source)
