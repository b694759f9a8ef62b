"""A built vLLM model, layer by layer and row by row: the one way in which blending computes anything.

A row is a token of one prompt, at its position. Rows of a layer are computed by the layer's own code and the engine's
own attention kernel, which writes their KV into the paged cache and reads what lies before them. Runs of consecutive
rows are passed off as requests (`kernels.blend.rows`), so the stock kernel has the true mask. No model has code here.

Leans on vLLM: `set_forward_context`, `CommonAttentionMetadata`, `AttentionMetadataBuilder.build`;
`GPUModelRunner.get_model`, `attn_groups`, `vllm_config` and `device`; `embed_input_ids` of a model, and its decoder
layers, called as `layer(positions, hidden, residual)`; of their `Attention` `forward`, `impl.do_kv_cache_update`,
`kv_cache`, `layer_name`, `num_kv_heads`, `head_size`. On the engine thread, between two steps, in inference mode.
Between steps the connector has no metadata, so vLLM calls none of its layerwise hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from deployments.engine.load_paths.blending.refusals import attentions_of, inv_freq_of, ropes_of
from kernels.blend.rows import runs_of, slots_of
from kernels.rope.shift import shift_keys


class RowGroup(NamedTuple):
    """Some rows of a prompt as the attention sees them: made once, used by every layer."""

    positions: torch.Tensor
    slots: torch.Tensor
    metadata: Any


class _CapturedError(Exception):
    """A layer has been broken off: its keys and values are known."""


class BlendModel:
    """See the module's docstring. Only for a model of which `refusals.why_not` says nothing."""

    def __init__(self, runner: Any) -> None:
        self._model = runner.get_model()
        self._config = runner.vllm_config
        self._layers = list(self._model.model.layers)
        self._attentions = [attentions_of(layer)[0] for layer in self._layers]
        self._builder = runner.attn_groups[0][0].get_metadata_builder(0)
        self.device: torch.device = runner.device
        self.block_size: int = self._config.cache_config.block_size
        self.dtype: torch.dtype = self._config.model_config.dtype
        self.row_bytes: int = 2 * self._config.model_config.get_hidden_size() * self.dtype.itemsize
        """Of a row between two layers: hidden states and residual."""
        self.vocabulary: int = self._config.model_config.get_vocab_size()
        rope = [ropes_of(layer)[0] for layer in self._layers]
        self._styles = ["neox" if one.is_neox_style else "gptj" for one in rope]
        self._inv_freq = [_found(inv_freq_of(one)).to(self.device) for one in rope]

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def on_device(self, values: Sequence[int]) -> torch.Tensor:
        """Whole numbers, int64, where the model is."""
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input: ``(rows, hidden size)``."""
        return self._model.embed_input_ids(tokens)

    def group(self, positions: torch.Tensor, block_ids: torch.Tensor) -> RowGroup:
        """Rows at ascending ``positions`` of the sequence whose KV lies in the blocks ``block_ids``.

        Built fast: else FlashAttention keeps the kernel's schedule in one buffer of the builder, sized for vLLM's own
        batches, and the next group, or the engine's next step, would overwrite this one's.
        """
        runs = runs_of(positions)
        slots = slots_of(positions, block_ids, self.block_size)
        table = block_ids.to(torch.int32)[None].expand(len(runs.lengths), -1).contiguous()
        common = CommonAttentionMetadata(
            query_start_loc=runs.starts,
            query_start_loc_cpu=runs.starts.cpu(),
            seq_lens=runs.lengths,
            num_reqs=len(runs.lengths),
            num_actual_tokens=len(positions),
            max_query_len=runs.longest,
            max_seq_len=runs.context,
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
        )
        return RowGroup(positions, slots, self._builder.build(0, common, fast_build=True))

    def compute(
        self, layer: int, group: RowGroup, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer on some rows, which writes their KV; returns what the next layer takes.

        ``hidden`` and ``residual`` may be overwritten. All KV before the rows must be there.
        """
        name = self._attentions[layer].layer_name
        with self._context([name], group):
            hidden, residual = self._layers[layer](group.positions, hidden, residual)
        return hidden, residual

    def keys_and_values(
        self, layer: int, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The KV that a layer would write, keys rotated: both ``(rows, kv_heads, head_dim)``, contiguous.

        The layer's own code, broken off at its attention: whatever a model does to keys and values is done. It works in
        place (fused norms), so it has copies.
        """
        attention = self._attentions[layer]
        found: list[torch.Tensor] = []

        def stop(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            found.extend((key, value))
            raise _CapturedError

        attention.forward = stop  # on the instance, before the class's
        try:
            self._layers[layer](positions, hidden.clone(), None if residual is None else residual.clone())
        except _CapturedError:
            pass
        finally:
            del attention.forward
        shape = (len(positions), attention.num_kv_heads, attention.head_size)
        key, value = found
        return key.reshape(shape).contiguous(), value.reshape(shape).contiguous()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put KV into the cache, at any tokens of any blocks."""
        attention = self._attentions[layer]
        attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    def shifted(self, layer: int, keys: torch.Tensor, positions: int) -> torch.Tensor:
        """Return a copy, on the model's device, of a layer's rotated keys, moved by `positions`."""
        moved = keys.to(self.device, copy=True)
        style: Any = self._styles[layer]
        shift_keys(moved, positions, self._inv_freq[layer], style)
        return moved

    def forward(self, tokens: torch.Tensor, group: RowGroup) -> None:
        """vLLM's whole forward pass over some rows: what the layers by themselves must be equal to."""
        with self._context([attention.layer_name for attention in self._attentions], group):
            self._model(input_ids=tokens, positions=group.positions)

    def _context(self, names: list[str], group: RowGroup) -> Any:
        return set_forward_context(
            dict.fromkeys(names, group.metadata),
            self._config,
            num_tokens=len(group.positions),
            slot_mapping=dict.fromkeys(names, group.slots),
        )


def _found(inv_freq: torch.Tensor | None) -> torch.Tensor:
    assert inv_freq is not None, "`why_not` has refused such a model"
    return inv_freq
