"""What a model answers if each layer and KV head sees some tokens of a prefix: transformers' own forward, masked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "crosskv_masked"


class MaskedReference:
    """In float32. Tokens of the prefix see each other; tokens behind it see what is kept of it, and each other."""

    def __init__(self, folder: Path) -> None:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, self._attend)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION
        )
        self._masks: list[torch.Tensor] = []

    def log_probabilities(
        self, tokens: Sequence[int], prefix_tokens: int, kept: Sequence[Sequence[Sequence[int]]]
    ) -> torch.Tensor:
        """`(tokens, vocabulary)`: of the token after each. `kept[layer][head]`: the prefix's tokens that are seen."""
        self._masks = [self._mask(len(tokens), prefix_tokens, heads) for heads in kept]
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @staticmethod
    def _mask(tokens: int, prefix: int, kept: Sequence[Sequence[int]]) -> torch.Tensor:
        """`(kv_heads, tokens, tokens)`: what each token sees."""
        seen = torch.ones(len(kept), tokens, tokens, dtype=torch.bool).tril()
        for head, rows in enumerate(kept):
            seen[head, prefix:, :prefix] = False
            seen[head, prefix:, list(rows)] = True
        return seen

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        seen = self._masks[module.layer_idx].repeat_interleave(group, 0)[None]
        scores = query @ key.transpose(2, 3) * options["scaling"]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None
