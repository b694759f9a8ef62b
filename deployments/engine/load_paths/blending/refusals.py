"""Whether a built model can be blended: a sentence where it cannot. What this does not see, the self-test does.

Leans on vLLM: `VllmConfig`; `GPUModelRunner.get_model`, `attn_groups` and their `kernel_block_size`; a model whose
`model.layers` are its decoder layers, each with one `Attention` (`sliding_window`, `kv_sharing_target_layer_name`) and
one rotary embedding; the classes of those whose rotation of a position depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import (
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from deployments.engine.checks import PLAIN_KV

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def why_not(config: VllmConfig, runner: Any) -> str | None:
    """A sentence where the model of a built engine is not blended; None where the self-test may try it."""
    return next(_of_config(config), None) or next(_of_model(runner), None)


def _of_config(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    if config.lora_config is not None:
        yield "LoRA adapters change keys and values"
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        yield "the model is spread over several processes"
    if config.speculative_config is not None:
        yield "speculative decoding keeps KV of its own"
    if config.model_config.use_mla:
        yield "the model's attention is latent (MLA)"
    if config.model_config.get_sliding_window():
        yield "the model attends to a sliding window"
    if config.model_config.is_multimodal_model:
        yield "the model reads more than text"
    if config.cache_config.cache_dtype not in PLAIN_KV:
        yield f"its KV cache is kept as {config.cache_config.cache_dtype}"


def _of_model(runner: Any) -> Iterator[str]:
    model = runner.get_model()
    groups = [group for kind in runner.attn_groups for group in kind]
    if len(groups) != 1 or groups[0].kernel_block_size is not None:
        yield "its attention has several kinds of metadata, or blocks of another size than the cache's"
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    if len(layers) < 2 or not hasattr(model, "embed_input_ids"):
        yield "the model has no `model.layers`, or just one"
    for number, layer in enumerate(layers):
        attentions = attentions_of(layer)
        if len(attentions) != 1:
            yield f"layer {number} has {len(attentions)} attentions"
        elif attentions[0].sliding_window is not None or attentions[0].kv_sharing_target_layer_name is not None:
            yield f"layer {number} attends to a window, or to another layer's KV"
        ropes = ropes_of(layer)
        if len(ropes) != 1:
            yield f"layer {number} has {len(ropes)} rotary embeddings, so its keys cannot be moved"
        elif inv_freq_of(ropes[0]) is None:
            yield f"keys of a {type(ropes[0]).__name__} cannot be moved: its angles depend on more than the position"


def attentions_of(layer: torch.nn.Module) -> list[Any]:
    """The attentions of a decoder layer."""
    return [module for module in layer.modules() if isinstance(module, Attention)]


def ropes_of(layer: torch.nn.Module) -> list[Any]:
    """The rotary embeddings of a decoder layer."""
    return [module for module in layer.modules() if isinstance(module, RotaryEmbeddingBase)]


def inv_freq_of(rope: Any) -> torch.Tensor | None:
    """The radians per position of each pair, float32; None where they depend on more than the position.

    Not from `cos_sin_cache`, which is rounded to the model's dtype.
    """
    kind = type(rope)
    if kind in (RotaryEmbedding, Llama3RotaryEmbedding, NTKScalingRotaryEmbedding):
        found = rope._compute_inv_freq(rope.base)
    elif kind is YaRNScalingRotaryEmbedding:
        found = rope._compute_inv_freq(rope.scaling_factor)
    elif kind is LinearScalingRotaryEmbedding and len(rope.scaling_factors) == 1:
        found = rope._compute_inv_freq(rope.base) / rope.scaling_factors[0]
    else:
        return None
    return torch.as_tensor(found, dtype=torch.float32)
