"""How fast paged gather and scatter are, beside memcpy of the same bytes: ``python -m kernels.benchmark --json -``.

Every repetition moves whole segments through a pool and a set of segment buffers that are far larger than the caches,
blocks in random order, and takes gather, scatter and memcpy in turn, so that a neighbour on the machine slows them all.
Time is the calling thread's CPU time: what it waits for a core, on a machine that is shared, counts for none of them.
"""

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.layout import LayoutKind, PagedLayout
from kernels.paged import gather, scatter, warm_up

SEGMENT_TOKENS = 256
BLOCK_SIZE = 32
POOL_BYTES = 192 * 2**20  # of KV in the pool, and again in segment buffers; a server's last-level cache is 32 MB or so


@dataclass(frozen=True)
class Model:
    """The KV shape of a model: what one token costs is ``2 * num_layers * num_kv_heads * head_dim`` elements."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


MODELS = (Model("demo", 6, 2, 64), Model("0.5B", 24, 2, 64))


def measure(model: Model, kind: LayoutKind, repetitions: int) -> dict[str, object]:
    """GB/s (1e9 bytes moved per second, counted once) of each operation: the median over ``repetitions``."""
    layout = PagedLayout(kind, BLOCK_SIZE, model.num_kv_heads, model.head_dim, torch.bfloat16)
    warm_up(layout)
    blocks_per_segment = SEGMENT_TOKENS // BLOCK_SIZE
    shape = layout.segment_shape(model.num_layers, blocks_per_segment)
    segment_bytes = torch.Size(shape).numel() * layout.dtype.itemsize
    num_segments = POOL_BYTES // segment_bytes
    pool_shape = (num_segments * blocks_per_segment, *layout.block_shape)
    layers = [torch.ones(pool_shape, dtype=layout.dtype) for _ in range(model.num_layers)]
    segments = [torch.ones(shape, dtype=layout.dtype) for _ in range(num_segments)]
    order = torch.randperm(pool_shape[0], generator=torch.Generator().manual_seed(0))
    placements = list(zip(order.view(num_segments, -1).tolist(), segments, strict=True))

    def gather_all() -> None:
        for block_ids, segment in placements:
            gather(layers, block_ids, layout, segment)

    def scatter_all() -> None:
        for block_ids, segment in placements:
            scatter(layers, block_ids, layout, segment)

    def memcpy_all() -> None:
        for source, target in zip(segments, segments[num_segments // 2 :] + segments, strict=False):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), segment_bytes)

    operations: dict[str, Callable[[], None]] = {"gather": gather_all, "scatter": scatter_all, "memcpy": memcpy_all}
    rates: dict[str, list[float]] = {name: [] for name in operations}
    for _, (name, operation) in itertools.product(range(repetitions), operations.items()):
        start = time.thread_time()
        operation()
        rates[name].append(num_segments * segment_bytes / (time.thread_time() - start) / 1e9)
    ratios = {
        f"{name}_over_memcpy": round(
            statistics.median(a / b for a, b in zip(rates[name], rates["memcpy"], strict=True)), 3
        )
        for name in ("gather", "scatter")
    }
    gb_per_s = {f"{name}_gb_per_s": round(statistics.median(values), 2) for name, values in rates.items()}
    return {"model": model.name, "layout": kind.value, "segment_bytes": segment_bytes, **gb_per_s, **ratios}


def main() -> None:
    """Measure every model on both CPU layouts; JSON to ``--json`` (``-``: standard output)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", default="-", help="where to write the results (default: -)")
    parser.add_argument("--repetitions", type=int, default=9, help="passes over the pool per operation (default: 9)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = (LayoutKind.CPU_VEC, LayoutKind.CPU_AMX)
    results = [measure(model, kind, arguments.repetitions) for model, kind in itertools.product(MODELS, kinds)]
    text = json.dumps({"torch": torch.__version__, "results": results}, indent=2) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    else:
        Path(arguments.json).write_text(text)


if __name__ == "__main__":
    main()
