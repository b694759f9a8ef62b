"""Selects each layer's keys for requests with a sparse prefix: the one contact with vLLM's model runner.

Leans on vLLM, `vllm.v1.worker.gpu_model_runner.GPUModelRunner`: `_build_attention_metadata` returns (metadata by layer
name, metadata for a draft model) and is told `num_scheduled_tokens` by real steps only; it asks the one
`AttentionGroup` of `attn_groups` for it by `build_metadata(common_attn_metadata, ubatch)`; rows of
`input_batch.req_ids` and `num_computed_tokens_cpu` are those of the metadata's `block_table_tensor` and `seq_lens`.
`CommonAttentionMetadata` has `replace`; what it has derived from `seq_lens` is `_num_computed_tokens_cache`. The slot
mapping is made before and is left alone. `tests/deployments/engine/load_paths/sparse` fails when one of these changes.

Layers in which all rows are shifted alike share one metadata, so at most as many are built as there are different
budgets. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deployments.engine.load_paths.sparse.prefix import SparsePrefix


class SparsePresenter:
    """See the module's docstring. `layer_names`: vLLM's, in layer order."""

    def __init__(self, runner: Any, layer_names: Sequence[str], block_size: int) -> None:
        self._runner = runner
        self._layer_names = list(layer_names)
        self._block_size = block_size
        self._prefixes: dict[str, SparsePrefix] = {}
        self._is_installed = False

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._prefixes

    def __len__(self) -> int:
        return len(self._prefixes)

    def enter(self, request_id: str, prefix_blocks: int, kept_blocks_per_layer: Sequence[int]) -> SparsePrefix:
        """From now on the request attends to its prefix as kept. Raises ValueError for what is no prefix.

        Before the request is in a step, and only if by then all blocks of its prefix are such as a sparse load wrote.
        """
        prefix = SparsePrefix(prefix_blocks, tuple(kept_blocks_per_layer))
        if len(prefix.kept) != len(self._layer_names):
            raise ValueError(f"{len(prefix.kept)} layers, and the model has {len(self._layer_names)}")
        self._install()
        self._prefixes[request_id] = prefix
        return prefix

    def leave(self, request_id: str) -> None:
        """The request has ended, or is an ordinary one from now on; one that never entered is no error."""
        self._prefixes.pop(request_id, None)

    def _install(self) -> None:
        """Put the wrapper around the runner's method: with the first sparse request, and not before."""
        if self._is_installed:
            return
        self._is_installed = True
        build = self._runner._build_attention_metadata

        def build_with_prefixes(*args: Any, **kwargs: Any) -> Any:
            if not self._prefixes or not kwargs.get("num_scheduled_tokens"):  # a dummy run schedules nothing
                return build(*args, **kwargs)
            rows = self._sparse_rows()
            if not rows:
                return build(*args, **kwargs)
            return self._build(build, rows, *args, **kwargs)

        self._runner._build_attention_metadata = build_with_prefixes

    def _sparse_rows(self) -> dict[int, SparsePrefix]:
        """The prefixes of this step's rows. Raises RuntimeError for one that has not all of its prefix."""
        batch = self._runner.input_batch
        rows = {
            row: self._prefixes[request_id]
            for row, request_id in enumerate(batch.req_ids)
            if request_id in self._prefixes
        }
        for row, prefix in rows.items():
            if batch.num_computed_tokens_cpu[row] < prefix.blocks * self._block_size:
                raise RuntimeError(f"request {batch.req_ids[row]} computes a part of its sparse prefix: wrong KV")
        return rows

    def _build(self, build: Any, rows: dict[int, SparsePrefix], *args: Any, **kwargs: Any) -> Any:
        ((group,),) = self._runner.attn_groups
        ordinary = group.build_metadata
        seen: list[Any] = []

        def catch(common: Any, *rest: Any, **more: Any) -> Any:
            seen.append(common)
            return ordinary(common, *rest, **more)

        group.build_metadata = catch
        try:
            metadata, for_draft = build(*args, **kwargs)
        finally:
            del group.build_metadata
        (common,) = seen
        made: dict[tuple[int, ...], Any] = {}
        shifts_of_rows = [prefix.shifts for prefix in rows.values()]
        for name, shifts in zip(self._layer_names, zip(*shifts_of_rows, strict=True), strict=True):
            if not any(shifts):
                continue
            if shifts not in made:
                made[shifts] = ordinary(shifted(common, dict(zip(rows, shifts, strict=True)), self._block_size))
            metadata[name] = made[shifts]
        return metadata, for_draft


def shifted(common: Any, shifts: dict[int, int], block_size: int) -> Any:
    """vLLM's `CommonAttentionMetadata` with some rows' first `shifts[row]` block slots left out."""
    table, lengths = common.block_table_tensor.clone(), common.seq_lens.clone()
    upper = common.seq_lens_cpu_upper_bound
    upper = None if upper is None else torch.clone(upper)
    for row, shift in shifts.items():
        if shift:
            table[row, :-shift] = common.block_table_tensor[row, shift:]
            lengths[row] -= shift * block_size
            if upper is not None:
                upper[row] -= shift * block_size
    return common.replace(
        block_table_tensor=table,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=upper,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
