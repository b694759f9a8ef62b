"""Copies a sample of the queries of tolerant prompts while they are computed: their KV's attention mass is made of it.

Leans on vLLM: `Attention.impl.forward(layer, query, key, value, kv_cache, attn_metadata, …)` of each layer instance,
which eager, compiled and piecewise graphs call each time, with `query (tokens, heads, head_dim)` after its rotary;
`impl.scale`; a step's `attn_metadata.query_start_loc` is the runner's own buffer `query_start_loc.gpu`, which host
memory has as `.np`, with the rows of `input_batch.req_ids` and `num_computed_tokens_cpu`. So nothing waits for a
device. What has other metadata is no step: a blend computes layers by itself.

A step copies the queries at positions 15 mod 16 of the requests that are watched, in each layer: a few KB. Nothing is
asked of it before a segment is saved. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from deployments.engine.load_paths.sparse.query_sample import QuerySample, SampledStep
from kernels.sparse.mass import SAMPLED_EVERY

MOST_BYTES = 64 << 20
"""Of all samples together; what comes beyond is not sampled, and its segments are stored dense."""


class QueryWatch:
    """See the module's docstring. `layers`: vLLM's attention layers, in layer order."""

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
