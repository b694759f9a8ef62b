"""Copies a sample of the queries of tolerant prompts while they are computed: their KV's attention mass is made of it.

Leans on vLLM: `Attention.impl.forward(layer, query, key, value, kv_cache, attn_metadata, …)` of each layer instance,
which eager, compiled and piecewise graphs call each time, with `query (tokens, heads, head_dim)` after its rotary;
`impl.scale`; a step's `attn_metadata.query_start_loc` is the runner's own buffer `query_start_loc.gpu`, which host
memory has as `.np`, with the rows of `input_batch.req_ids` and `num_computed_tokens_cpu`. So nothing waits for a
device. What has other metadata is no step: a blend computes layers by itself.

A step copies the queries at positions 15 mod 16 of the requests that are watched, in each layer: a few KB, on the
engine thread. Nothing is asked of them before a segment is saved: the save thread asks what attention they give to a
segment's keys, when it has copied those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from deployments.segment_store.sparse.segments import Mass, mass_bytes, with_mass
from kernels.dtypes import DTYPES, array_of
from kernels.sparse.mass import SAMPLED_EVERY, attention_mass
from kvmanager.segments.format import read_header

MOST_BYTES = 64 << 20
"""Of all samples together; what comes beyond is not sampled, and its segments are stored dense."""


@dataclass(slots=True)
class SampledStep:
    """What one step computed: positions in the sequence `(n,)`, and of each layer the queries `(n, heads, dim)`."""

    positions: torch.Tensor
    queries: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class QuerySample:
    """A sample of one request's queries. The engine thread appends steps; any thread reads those that are whole.

    A `deployments.transfer.jobs.SegmentTail`: the mass is stored behind a segment.
    """

    layers: int
    scale: float
    block_size: int
    kv_heads: int
    on_end: Callable[[], None] = lambda: None
    steps: list[SampledStep] = field(default_factory=list)

    def nbytes(self, num_blocks: int) -> int:
        """See `SegmentTail`."""
        return mass_bytes(self.layers, self.kv_heads, num_blocks * self.block_size)

    def append(self, sealed: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Any:
        """See `SegmentTail`."""
        mass = self.mass(sealed, self.block_size)
        return sealed if mass is None else with_mass(sealed, mass)

    def end(self) -> None:
        """See `SegmentTail`. Sample no more."""
        self.on_end()

    def mass(self, sealed: np.ndarray[tuple[int], np.dtype[np.uint8]], block_size: int) -> Mass | None:
        """The mass of a raw sealed segment; None where no query of the sample has seen all of it."""
        header = read_header(sealed.data)
        layers, _, tokens, _, _ = header.shape
        first = header.start_block * block_size
        steps = [step for step in tuple(self.steps) if len(step.queries) == self.layers == layers]
        if not steps:
            return None
        positions = torch.cat([step.positions for step in steps]).cpu().numpy()
        if int(positions.max()) < first + tokens - 1:
            return None
        kv = np.frombuffer(sealed.data, DTYPES[header.dtype], offset=header.body_offset).reshape(header.shape)
        mass = [
            attention_mass(
                array_of(torch.cat([step.queries[layer] for step in steps]).cpu()),
                positions,
                kv[layer, 0],
                first,
                self.scale,
            )
            for layer in range(layers)
        ]
        return np.stack(mass)


class QueryWatch:
    """See the module's docstring. On the engine thread. `layers`: vLLM's attention layers, in layer order."""

    def __init__(self, runner: Any, layers: Sequence[Any], block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._kv_heads = int(layers[0].num_kv_heads)
        self._samples: dict[str, QuerySample] = {}
        self._scale = float(layers[0].impl.scale)
        self._layers = len(layers)
        self._step: list[tuple[torch.Tensor, SampledStep]] = []
        self._bytes: dict[str, int] = {}
        self._query_bytes = int(layers[0].num_heads * layers[0].head_size * runner.model_config.dtype.itemsize)
        for number, layer in enumerate(layers):
            self._wrap(number, layer.impl)

    def watch(self, request_id: str) -> QuerySample:
        """Sample this request's queries from now on, until the sample is ended."""
        sample = self._samples[request_id] = QuerySample(
            self._layers, self._scale, self._block_size, self._kv_heads, partial(self._forget, request_id)
        )
        return sample

    def _forget(self, request_id: str) -> None:
        self._samples.pop(request_id, None)
        self._bytes.pop(request_id, None)

    def _wrap(self, number: int, impl: Any) -> None:
        forward = impl.forward

        def sampling_forward(layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *rest: Any,
                             **more: Any) -> Any:  # fmt: skip
            if self._samples and metadata is not None:
                if number == 0:
                    self._step = self._rows_of(metadata)
                for rows, step in self._step:
                    if len(step.queries) == number:
                        step.queries.append(query.index_select(0, rows))
            return forward(layer, query, key, value, kv_cache, metadata, *rest, **more)

        impl.forward = sampling_forward

    def _rows_of(self, metadata: Any) -> list[tuple[torch.Tensor, SampledStep]]:
        """Which rows of this step's queries are sampled, by request; none where this is no step of the runner."""
        found: list[tuple[torch.Tensor, SampledStep]] = []
        of_runner, batch = self._runner.query_start_loc, self._runner.input_batch
        if metadata.query_start_loc.data_ptr() != of_runner.gpu.data_ptr():
            return found
        starts = of_runner.np[: len(metadata.query_start_loc)].tolist()
        for row, request_id in enumerate(batch.req_ids):
            sample = self._samples.get(request_id)
            if sample is None or row + 1 >= len(starts):
                continue
            count, first = starts[row + 1] - starts[row], int(batch.num_computed_tokens_cpu[row])
            sampled = range(first + (SAMPLED_EVERY - 1 - first) % SAMPLED_EVERY, first + count, SAMPLED_EVERY)
            if not sampled or not self._has_room(request_id, len(sampled)):
                continue
            if sample.steps and int(sample.steps[-1].positions[-1]) >= sampled[0]:
                sample.steps.clear()  # it was preempted, and is recomputed
            shift, device = starts[row] - first, metadata.query_start_loc.device
            rows = torch.tensor([shift + position for position in sampled]).to(device, non_blocking=True)
            step = SampledStep(torch.tensor(sampled))
            sample.steps.append(step)
            found.append((rows, step))
        return found

    def _has_room(self, request_id: str, queries: int) -> bool:
        nbytes = queries * self._layers * self._query_bytes
        if sum(self._bytes.values()) + nbytes > MOST_BYTES:
            return False
        self._bytes[request_id] = self._bytes.get(request_id, 0) + nbytes
        return True
