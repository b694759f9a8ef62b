"""What app/ and deployments/ lean on inside vLLM. After an upgrade `test_vllm_symbols.py` says what is gone.

`IMPORTED` is every name that they import, `USED` what they ask of objects whose class they may not even import.
Signatures and behaviour are held by `tests/app` and `tests/deployments` (their `*_contract.py`).
"""

VERSION = "0.32.0"
"""The one version that this project is tested with; the lock files pin it."""

IMPORTED: dict[str, set[str]] = {
    "vllm": {"envs"},
    "vllm.config": {"KVEventsConfig", "KVTransferConfig", "ModelConfig", "VllmConfig"},
    "vllm.distributed.kv_events": {"AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEventBatch"},
    "vllm.distributed.kv_transfer": {"get_kv_transfer_group"},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1",
        "KVConnectorMetadata",
        "KVConnectorRole",
    },
    "vllm.engine.arg_utils": {"AsyncEngineArgs"},
    "vllm.engine.protocol": {"EngineClient"},
    "vllm.entrypoints.generate.base.protocol": {"validate_cache_salt"},
    "vllm.entrypoints.openai.chat_completion.api_router": {"create_chat_completion"},
    "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest", "ChatCompletionResponse"},
    "vllm.entrypoints.openai.chat_completion.serving": {"OpenAIServingChat"},
    "vllm.entrypoints.openai.completion.api_router": {"create_completion"},
    "vllm.entrypoints.openai.completion.protocol": {"CompletionRequest", "CompletionResponse"},
    "vllm.entrypoints.openai.completion.serving": {"OpenAIServingCompletion"},
    "vllm.entrypoints.openai.models.api_router": {"show_available_models"},
    "vllm.entrypoints.openai.models.protocol": {"BaseModelPath"},
    "vllm.entrypoints.openai.models.serving": {"OpenAIServingModels"},
    "vllm.entrypoints.serve.engine.protocol": {
        "ErrorInfo",
        "ErrorResponse",
        "ModelList",
        "PromptTokenUsageInfo",
        "UsageInfo",
    },
    "vllm.entrypoints.serve.exception_handling.register": {"init_exception_handler"},
    "vllm.entrypoints.serve.tokenize.api_router": {"detokenize", "tokenize"},
    "vllm.entrypoints.serve.tokenize.protocol": {
        "DetokenizeResponse",
        "TokenizeChatRequest",
        "TokenizeCompletionRequest",
        "TokenizeResponse",
    },
    "vllm.entrypoints.serve.tokenize.serving": {"ServingTokenization"},
    "vllm.entrypoints.serve.utils.api_utils": {"validate_json_request"},
    "vllm.entrypoints.serve.utils.sse_keep_alive": {"SSE_KEEP_ALIVE_COMMENT"},
    "vllm.exceptions": {"GenerationError", "GracefulHTTPError", "VLLMClientError", "VLLMValidationError"},
    "vllm.forward_context": {"ForwardContext", "set_forward_context"},
    "vllm.inputs": {"EngineInput"},
    "vllm.lora.request": {"LoRARequest"},
    "vllm.model_executor.layers.attention": {"Attention"},
    "vllm.model_executor.layers.rotary_embedding": {
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "NTKScalingRotaryEmbedding",
        "RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    },
    "vllm.model_executor.layers.rotary_embedding.base": {"RotaryEmbeddingBase"},
    "vllm.model_executor.models.utils": {"extract_layer_index"},
    "vllm.outputs": {"RequestOutput"},
    "vllm.platforms": {"current_platform"},
    "vllm.renderers": {"BaseRenderer", "ChatParams", "TokenizeParams", "renderer_from_config"},
    "vllm.renderers.chat_utils": {"ConversationMessage", "has_non_text_content", "load_chat_template"},
    "vllm.renderers.online_renderer": {"OnlineRenderer"},
    "vllm.sampling_params": {"RequestOutputKind", "SamplingParams", "StructuredOutputsParams"},
    "vllm.tokenizers": {"cached_tokenizer_from_config"},
    "vllm.usage.usage_lib": {"UsageContext"},
    "vllm.utils.async_utils": {"make_async"},
    "vllm.utils.mistral": {"is_mistral_tokenizer"},
    "vllm.v1.attention.backend": {"CommonAttentionMetadata"},
    "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa"},
    "vllm.v1.core.block_pool": {"BlockPool"},
    "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks", "KVCacheManager"},
    "vllm.v1.core.kv_cache_utils": {
        "BlockHash",
        "FreeKVCacheBlockQueue",
        "KVCacheBlock",
        "make_block_hash_with_group_id",
    },
    "vllm.v1.core.sched.output": {"SchedulerOutput"},
    "vllm.v1.core.sched.scheduler": {"Scheduler"},
    "vllm.v1.engine": {
        "EngineCoreOutput",
        "EngineCoreOutputs",
        "EngineCoreRequest",
        "EngineCoreRequestType",
        "FinishReason",
    },
    "vllm.v1.engine.async_llm": {"AsyncLLM"},
    "vllm.v1.engine.core": {"EngineCore", "EngineCoreProc"},
    "vllm.v1.engine.exceptions": {"EngineDeadError"},
    "vllm.v1.engine.input_processor": {"InputProcessor"},
    "vllm.v1.executor": {"Executor"},
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec", "KVCacheConfig"},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource"},
    "vllm.v1.metrics.stats": {"RequestStateStats"},
    "vllm.v1.outputs": {"KVConnectorOutput"},
    "vllm.v1.request": {"Request", "RequestStatus"},
    "vllm.v1.structured_output": {"StructuredOutputManager"},
}
"""From module to names; an empty set: the module itself."""

USED: dict[str, set[str]] = {
    "vllm.model_executor.layers.attention:Attention": {
        "forward", "head_size", "impl", "kv_cache", "kv_sharing_target_layer_name", "layer_name", "num_heads",
        "num_kv_heads", "sliding_window",
    },
    "vllm.model_executor.layers.rotary_embedding:LinearScalingRotaryEmbedding": {"scaling_factors"},
    "vllm.model_executor.layers.rotary_embedding:RotaryEmbedding": {"_compute_inv_freq", "base", "is_neox_style"},
    "vllm.model_executor.layers.rotary_embedding:YaRNScalingRotaryEmbedding": {"_compute_inv_freq", "scaling_factor"},
    "vllm.v1.attention.backend:AttentionMetadataBuilder": {"build"},
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": {
        "alibi_slopes", "do_kv_cache_update", "forward", "scale", "sliding_window",
    },
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": {"query_start_loc", "seq_lens"},
    "vllm.v1.core.block_pool:BlockPool": {
        "_insert_block_hash", "blocks", "cache_full_blocks", "cached_block_hash_to_block", "evict_blocks",
        "free_block_queue", "free_blocks", "get_cached_block", "get_new_blocks", "get_num_free_blocks",
        "kv_event_queue", "medium", "null_block", "num_gpu_blocks", "touch",
    },
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {
        "allocate_slots", "block_pool", "enable_caching", "get_block_ids", "take_events",
    },
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": {"fake_free_list_head", "fake_free_list_tail"},
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": {
        "block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt",
    },
    "vllm.v1.core.sched.output:CachedRequestData": {
        "num_computed_tokens", "num_output_tokens", "req_ids", "resumed_req_ids",
    },
    "vllm.v1.core.sched.output:NewRequestData": {"num_computed_tokens", "req_id"},
    "vllm.v1.core.sched.output:SchedulerOutput": {
        "num_scheduled_tokens", "scheduled_cached_reqs", "scheduled_new_reqs", "total_num_scheduled_tokens",
    },
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "_free_request", "_is_blocked_waiting_status", "_preempt_request", "_request_blocks_can_be_freed",
        "add_request", "block_size", "connector", "finished_recving_kv_req_ids", "has_requests", "kv_cache_manager",
        "kv_event_publisher", "kv_holding_waiting", "max_num_active_reqs", "max_num_scheduled_tokens",
        "num_waiting_for_streaming_input", "prev_step_scheduled_req_ids", "requests", "running", "schedule",
        "scheduler_config", "update_from_output", "vllm_config", "waiting",
    },
    "vllm.v1.core.sched.request_queue:PriorityRequestQueue": {"_heap", "add_request", "remove_request"},
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": {"has_pending_block_frees"},
    "vllm.config:VllmConfig": {"additional_config"},
    "vllm.v1.engine.core:EngineCore": {
        "abort_requests", "add_request", "async_scheduling", "get_supported_tasks", "model_executor", "post_step",
        "preprocess_add_request", "reset_prefix_cache", "scheduler", "shutdown", "step_fn",
    },
    "vllm.v1.engine:EngineCoreRequestType": {"WAKEUP"},
    "vllm.v1.engine.core:EngineCoreProc": {
        "_handle_client_request", "_process_engine_step", "input_queue", "output_queue", "run_busy_loop",
        "run_engine_core", "shutdown", "vllm_config",
    },
    "vllm.v1.engine.core_client:AsyncMPClient": {"resources"},
    "vllm.v1.engine.core_client:BackgroundResources": {"engine_manager"},
    "vllm.v1.engine.utils:CoreEngineProcManager": {"processes"},
    "vllm.config:CompilationConfig": {"cudagraph_mode", "static_forward_context"},
    "vllm.config:CUDAGraphMode": {"has_full_cudagraphs"},
    "vllm.config:ParallelConfig": {
        "decode_context_parallel_size", "num_ubatches", "prefill_context_parallel_size", "world_size",
    },
    "vllm.config:ModelConfig": {"is_mm_prefix_lm", "rswa_window"},
    "vllm.v1.attention.backend:CommonAttentionMetadata": {
        "_num_computed_tokens_cache", "_token_to_req_indices_cache", "block_table_tensor", "replace", "seq_lens",
        "seq_lens_cpu_upper_bound",
    },
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": {"HOST"},
    "vllm.v1.metrics.stats:RequestStateStats": {"first_token_ts", "scheduled_ts"},
    "vllm.v1.request:Request": {
        "arrival_time", "block_hashes", "cache_salt", "is_prefill_chunk", "kv_transfer_params", "lora_request",
        "max_tokens", "mm_features", "num_computed_tokens", "num_output_tokens", "num_prompt_tokens", "num_tokens",
        "priority", "prompt_embeds", "prompt_token_ids", "request_id", "sampling_params",
        "skip_reading_prefix_cache", "status", "update_block_hashes",
    },
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
        "_bookkeeping_sync", "_build_attention_metadata", "_sample", "attn_groups", "device", "discard_request_mask",
        "get_model", "input_batch", "requests", "vllm_config",
    },
    "vllm.v1.worker.block_table:BlockTable": {"block_size"},
    "vllm.v1.worker.gpu_input_batch:InputBatch": {"block_table", "num_computed_tokens_cpu", "req_ids"},
    "vllm.v1.worker.utils:AttentionGroup": {
        "backend", "build_metadata", "get_metadata_builder", "kernel_block_size", "layer_names",
    },
}  # fmt: skip
"""From class to attributes."""
