"""A transformers model that attends to chosen keys of a prefix only: the reference for sparse KV.

Each layer and KV head sees its own choice of the prefix's keys, all with their original rotary phase, and everything
after the prefix. So the arithmetic is that of a server which holds the kept tokens alone. The same attention notes a
sample of queries while a prefix is computed. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.dtypes import array_of
from kernels.sparse.mass import SAMPLED_EVERY, attention_mass
from load_tests.codec.model import KV_DTYPE, segments

_NAME = "crosskv_masked"


class MaskedModel:
    """See the module. Changes how ``model`` attends, for good; other code should not use the model meanwhile."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError for a model whose attention is more than softmax over all keys before."""
        text = model.config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(text, "attn_logit_softcapping", None):
            raise ValueError("sparse KV is for models whose layers all attend to all keys before, without a cap")
        self.model = model
        self._kept: torch.Tensor | None = None
        self._queries: list[torch.Tensor] | None = None
        self._scale = 1.0
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attend)
        model.set_attn_implementation(_NAME)

    @torch.inference_mode()
    def prefix(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """KV of a prefix as `load_tests.codec.model.prefix_kv`, and its mass (layers, kv_heads, tokens), float32."""
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attend)
        self._kept, self._queries = None, []
        cache = self.model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1).past_key_values
        queries, self._queries = self._queries, None
        layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        kv = torch.stack(layers).transpose(2, 3).to(KV_DTYPE).contiguous()
        return kv, torch.stack([self._mass(kv[layer, 0], queries[layer]) for layer in range(len(kv))])

    @torch.inference_mode()
    def continued(self, kv: torch.Tensor, ids: Sequence[int], kept: torch.Tensor | None) -> torch.Tensor:
        """(len(ids), vocabulary) logits, float32, of reading `ids` after a prefix with this KV.

        ``kept (layers, kv_heads, tokens)`` says which of the prefix's keys are there; None: all.
        """
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attend)
        cache = DynamicCache(config=self.model.config)
        for number, layer in enumerate(kv.to(self.model.dtype).transpose(2, 3)):
            cache.update(layer[0][None], layer[1][None], number)
        self._kept = kept
        out: torch.Tensor = self.model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True).logits[0]
        self._kept = None
        return out.float()

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, scaling: float,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """As transformers calls it: (1, heads, tokens, head_dim) each."""
        self._scale = scaling
        if self._queries is not None:
            self._queries.append(query[0, :, SAMPLED_EVERY - 1 :: SAMPLED_EVERY].transpose(0, 1).contiguous())
        new, total = query.shape[2], key.shape[2]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)[None]
        if self._kept is not None:
            of_layer = self._kept[module.layer_idx]
            mask = mask.repeat(len(of_layer), 1, 1)
            mask[:, :, : of_layer.shape[1]] &= of_layer[:, None]
            mask = mask.repeat_interleave(query.shape[1] // len(of_layer), 0)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[None], scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def _mass(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """(kv_heads, tokens), of each segment by itself, as a server has it."""
        positions = np.arange(len(queries)) * SAMPLED_EVERY + SAMPLED_EVERY - 1
        parts = []
        for part in segments(keys[None, None]):
            own = array_of(keys[part].contiguous())
            parts.append(attention_mass(array_of(queries), positions, own, part.start, self._scale))
        return torch.from_numpy(np.concatenate(parts, axis=1))
