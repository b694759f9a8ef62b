"""A wider model for the codec table: Qwen2.5-0.5B's shape with random weights, and what recomputing its KV costs."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from load_tests.codec.model import prefix_kv

LAYERS, KV_HEADS, HEAD_DIM = 24, 2, 64
VOCABULARY = 4096
"""Smaller than the real one's 152,000: prefill computes the last token's logits only, so the time is the same."""


def wide_model(layers: int = LAYERS) -> Any:
    """Random weights, seeded; biases of keys and queries too, which give channels means as trained models have them."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            parameter.normal_()
    return model


def random_ids(tokens: int, seed: int) -> list[int]:
    """Token ids."""
    return torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def recompute_tokens_per_s(model: Any, tokens: int, rounds: int) -> float:
    """Prefill on one core, in bfloat16 or float32, whichever is the faster here; the best of ``rounds``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = 0.0
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            for number in range(rounds):
                began = time.thread_time()
                prefix_kv(model, random_ids(tokens, number))
                best = max(best, tokens / (time.thread_time() - began))
        return best
    finally:
        model.float()
        torch.set_num_threads(threads)
