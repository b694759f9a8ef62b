"""Models of a few small layers with random weights from a seed, for engines of kinds that the demo model is not.

Float32: what is loaded must be what would have been computed, to the last bit of an answer's tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from vllm.platforms import current_platform

from configs.settings import PROJECT_ROOT

SHAPE: dict[str, Any] = {
    "vocab_size": 1148, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
YARN = {
    "rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 150000.0,
    "original_max_position_embeddings": 1024, "truncate": False,
}  # fmt: skip


def gemma(window: int) -> PretrainedConfig:
    """Five layers with a window, one without, as Gemma 3."""
    return Gemma3TextConfig(**SHAPE, **SIX, sliding_window=window, query_pre_attn_scalar=64)


def gemma_3n() -> PretrainedConfig:
    """Windows and full attention by turns, of which the last two layers attend to others' KV, as Gemma 3n."""
    return Gemma3nTextConfig(
        **{**SHAPE, "tie_word_embeddings": True}, num_hidden_layers=6, sliding_window=96,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2, vocab_size_per_layer_input=1148, hidden_size_per_layer_input=64, laurel_rank=16,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 6,
    )  # fmt: skip


def gpt_oss() -> PretrainedConfig:
    """Windows and full attention by turns, with attention sinks and experts, as gpt-oss."""
    return GptOssConfig(
        **SHAPE, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=96,
        num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN, attention_bias=True,
    )  # fmt: skip


def mistral() -> PretrainedConfig:
    """A window in every layer, as Mistral 7B once had."""
    return MistralConfig(**SHAPE, num_hidden_layers=4, sliding_window=96)


KINDS: Mapping[str, tuple[Callable[[], PretrainedConfig], type[PreTrainedModel]]] = {
    "gemma, window of 96": (lambda: gemma(96), Gemma3ForCausalLM),
    "gemma, window of 136": (lambda: gemma(136), Gemma3ForCausalLM),
    "gemma 3n": (gemma_3n, Gemma3nForCausalLM),
    "gpt-oss": (gpt_oss, GptOssForCausalLM),
    "mistral": (mistral, MistralForCausalLM),
}


def qwen3_next() -> PretrainedConfig:
    """Three gated delta nets, which keep a state, and one layer of full attention, with experts, as Qwen3-Next."""
    return Qwen3NextConfig(
        **SHAPE, num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    )  # fmt: skip


MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 64,
}  # fmt: skip


def nemotron_h() -> PretrainedConfig:
    """Mamba 2, full attention and layers that keep nothing by turns, as Nemotron-H."""
    return NemotronHConfig(
        **SHAPE, layers_block_type=["mamba", "mlp", "mamba", "attention", "mamba", "mlp"], mamba_num_heads=8,
        mamba_head_dim=32, n_groups=1, ssm_state_size=32, conv_kernel=4, chunk_size=64, expand=2,
    )  # fmt: skip


def falcon_h1() -> PretrainedConfig:
    """Mamba 2 and full attention next to each other in every layer, as Falcon-H1."""
    return FalconH1Config(**SHAPE, **MAMBA, num_hidden_layers=3, mamba_d_ssm=256)


def granite_4() -> PretrainedConfig:
    """Mamba 2, full attention and experts, as Granite 4: its heads' size is not configured."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    return GraniteMoeHybridConfig(
        **shape, **MAMBA, num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64, attention_multiplier=0.125,
        position_embedding_type="nope",
    )  # fmt: skip


def lfm2() -> PretrainedConfig:
    """Short convolutions and one layer of full attention, as LFM2."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    return Lfm2Config(
        **shape, num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3,
        conv_dim=128, block_dim=128, block_multiple_of=64, block_auto_adjust_ff_dim=False,
    )  # fmt: skip


STATE_KINDS: Mapping[str, tuple[Callable[[], PretrainedConfig], type[PreTrainedModel], str]] = {
    "qwen3-next": (qwen3_next, Qwen3NextForCausalLM, "bfloat16"),
    "nemotron-h": (nemotron_h, NemotronHForCausalLM, "float32"),
    "falcon-h1": (falcon_h1, FalconH1ForCausalLM, "float32"),
    "granite-4": (granite_4, GraniteMoeHybridForCausalLM, "float32"),
    "lfm2": (lfm2, Lfm2ForCausalLM, "float32"),
}
"""Models with states, and the type that they are computed in: vLLM's gated delta nets know one alone on a CPU."""


def deepseek() -> PretrainedConfig:
    """Latent attention (MLA) and experts, as DeepSeek V2: latents of the only width that vLLM's CPU backends know."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    return DeepseekV2Config(
        **{**shape, "num_key_value_heads": 4}, num_hidden_layers=3, kv_lora_rank=512, q_lora_rank=None,
        qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=1, n_group=1, topk_group=1,
        topk_method="greedy", norm_topk_prob=False,
    )  # fmt: skip


LATENT_KINDS: Mapping[str, tuple[Callable[[], PretrainedConfig], type[PreTrainedModel]]] = {
    "deepseek": (deepseek, DeepseekV2ForCausalLM),
}


CACHES_LATENTS = not current_platform.is_cpu() or torch.cpu._is_amx_tile_supported()
"""Whether vLLM keeps a prefix cache of latents here: not with its reference backend, for CPUs without AMX."""


def keep_latents(patch: pytest.MonkeyPatch) -> int:
    """Have vLLM keep a prefix cache of latents here, and return its blocks' tokens.

    With its reference backend, where it keeps none, an answer from the cache is not the computed one: a token's latent
    depends on its prompt's later ones. So what is loaded is compared with what was cached of the same computation.
    """
    if CACHES_LATENTS:
        return 64
    platform = type(current_platform)
    choose = platform.check_and_update_config

    def choose_but_keep(config: Any) -> None:
        keeps = config.cache_config.enable_prefix_caching
        choose(config)
        config.cache_config.enable_prefix_caching = keeps

    patch.setattr(platform, "check_and_update_config", staticmethod(choose_but_keep))
    patch.setattr("configs.settings.CPU_BLOCK_MULTIPLE_TOKENS", 16)
    return 16


def write_model(kind: str, folder: Path) -> Path:
    """Write a model of a kind of these, with the demo model's tokenizer; return its folder."""
    make, model_class = {**KINDS, **STATE_KINDS, **LATENT_KINDS}[kind][:2]
    torch.manual_seed(7)
    model = model_class(make())
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if kind == "gemma 3n" and ("per_layer" in name or "embed" in name):
                weights.mul_(0.1 if "per_layer" in name else 1.0)  # else a token alone decides on the next one
            elif weights.dim() > 1:  # as drawn, layers would hardly differ from doing nothing
                weights.mul_(4.0 if "embed" not in name else 20.0)
            elif "A_log" in name:  # as drawn, states would forget all within a few tokens
                weights.normal_(-3.0, 0.3)
            elif "sinks" in name or "bias" in name:
                weights.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PROJECT_ROOT / "models" / "demo" / name, folder / name)
    return folder
