"""Nothing under `engine.extra_args` undoes what exactness leans on, and each name of vLLM's has been looked at."""

from __future__ import annotations

from typing import Any

import pytest

from configs.engine_arguments import NEUTRAL, OWNED, UNSAFE, check_extra_args, engine_argument_names, that_may_change_kv
from configs.settings import SettingsError, load_settings

_MAY_CHANGE_KV = """
    additional_config all2all_backend allow_deprecated_quantization attention_backend attention_config
    aux_output_config code_revision compilation_config config_format convert cp_kv_cache_interleave_size
    cpu_offload_gb cpu_offload_params cudagraph_capture_sizes dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate disable_cascade_attn disable_custom_all_reduce
    disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization disable_sliding_window dp_sync_interval
    ec_manager_config elastic_ep_max_dp_size enable_batch_sharded_sampling enable_cumem_allocator enable_dbo
    enable_ep_weight_filter enable_eplb enable_expert_parallel enable_flashinfer_autotune enable_hc_sp
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mixed_moe_lora_format
    enable_mm_embeds enable_moe_shared_loras enable_nccl_comm_suspend enable_return_routed_experts
    enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora enable_trace_replay engram_config
    eplb_config expert_placement_strategy fault_tolerance_config fully_sharded_loras gdn_prefill_backend
    generation_config hf_config_path hf_overrides ignore_patterns interleave_mm_strings ir_op_priority
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
    kv_sharing_fast_prefill language_model_only limit_mm_per_prompt linear_backend load_format lora_dtype
    lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
    mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm max_cpu_loras max_cudagraph_capture_size
    max_lora_cls_labels max_lora_rank max_loras media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
    mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
    mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
    model_class_overrides model_impl model_loader_extra_config model_weights moe_backend offload_backend
    offload_group_size offload_num_in_group offload_params offload_prefetch_step optimization_level
    override_generation_config performance_mode pooler_config prefix_cache_retention_interval quantization
    quantization_config replayssm_buffer_len runner skip_mm_profiling sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model spec_tokens
    specialize_active_lora speculative_config swa_bounded_replay tokens_only ubatch_size use_fp64_gumbel
    use_replayssm video_pruning_method video_pruning_rate
"""
MAY_CHANGE_KV = set(_MAY_CHANGE_KV.split())
"""Looked at in vllm 0.32.0: these may change what the model computes, or nobody has shown that they do not."""


def test_each_argument_of_vllms_has_been_looked_at() -> None:
    names = {name for name in engine_argument_names() if not name.startswith("_")}
    looked_at = set(OWNED) | set(UNSAFE) | NEUTRAL | MAY_CHANGE_KV
    assert len(names) > 200, "the names were not found in vLLM's source"
    assert names - looked_at == set(), "decide for each: owned, unsafe or neutral (configs.engine_arguments), or listed"
    assert looked_at - names == set(), "vLLM no longer knows these"


def test_each_argument_has_one_kind() -> None:
    kinds = [set(OWNED), set(UNSAFE), set(NEUTRAL), MAY_CHANGE_KV]
    assert sum(map(len, kinds)) == len(set.union(*kinds))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("async_scheduling", True, "noise would be stored"),
        ("kv_events_config", {"enable_kv_cache_events": False}, "'kv.enabled'"),
        ("prefix_caching_hash_algo", "xxhash", "'kv.enabled'"),
        ("data_parallel_size", 2, "`replicas`"),
        ("data_parallel_external_lb", True, "`replicas`"),
        ("tensor_parallel_size", 2, "'engine.tensor_parallel_size'"),
        ("pipeline_parallel_size", 2, "`engine.tensor_parallel_size`"),
        ("decode_context_parallel_size", 2, "`replicas`"),
        ("scheduler_cls", "mine.Scheduler", "stored before it is computed"),
        ("worker_cls", "mine.Worker", "stored before it is computed"),
        ("scheduling_policy", "priority", "overtake"),
        ("kv_offloading_size", 1.0, "kv.cpu_tier_bytes"),
        ("enable_lora", True, "adapter"),
        ("prefix_match_unit", 16, "engine.block_size_tokens"),
        ("weight_transfer_config", {}, "two KVs one name"),
    ],
)
def test_what_would_undo_exactness_is_refused_with_the_reason(name: str, value: Any, reason: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"engine": {"extra_args": {name: value}}})
    assert name in str(error.value)
    assert reason in str(error.value)


def test_every_unsafe_argument_may_say_what_holds_anyway_and_nothing_else() -> None:
    for name, (harmless, _) in UNSAFE.items():
        check_extra_args({name: harmless})
        with pytest.raises(ValueError, match=f"'{name}' cannot be changed"):
            check_extra_args({name: "something else"})


def test_only_what_may_change_kv_is_part_of_the_identity() -> None:
    args = {"load_format": "pt", "max_logprobs": 3, "quantization": None, "async_scheduling": False, "new_in_vllm": 1}
    assert that_may_change_kv(args) == {"load_format": "pt", "new_in_vllm": 1}
