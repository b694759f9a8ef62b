"""Arguments allowed under `engine.extra_args`, by the names of vLLM's AsyncEngineArgs.

Three kinds of names are told apart. *Owned* ones are decided by a setting of crosskv. *Unsafe* ones would undo what
exactness leans on, and are refused unless they say what holds anyway. *Neutral* ones change no KV. Every other one may
change KV, so it is part of the model's identity (`deployments.engine.model_identity`): a name that is not classified
costs a cold cache, never wrong KV. `tests/configs/test_engine_arguments.py` asks that each name of vLLM's be looked at.

The names are read from vLLM's source: importing vLLM takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SOURCE = Path("engine") / "arg_utils.py"
_CLASSES = ("EngineArgs", "AsyncEngineArgs")

OWNED: Mapping[str, str] = {
    "model": "model",
    "tokenizer": "model",
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "trust_remote_code": "trust_remote_code",
    "block_size": "engine.block_size_tokens",
    "num_gpu_blocks_override": "engine.device_blocks",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enforce_eager": "engine.enforce_eager",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "enable_prefix_caching": "kv.enabled",
    "kv_transfer_config": "kv.enabled",
    "kv_events_config": "kv.enabled",
    "prefix_caching_hash_algo": "kv.enabled",
}
"""The setting to use instead."""

_ONE_PROCESS = (
    "each replica's engine computes all layers of its requests on one node; serve more with `replicas`, or spread the "
    "heads with `engine.tensor_parallel_size`"
)
_OWN_LORA = "an adapter's KV is named by its files; list adapters in engine.lora_adapters"
_MEDIA_LORA = "an adapter that media choose has no name of its own, and prompts with media are not served"
_OTHER_STORE = "another store would take the place of crosskv's connector; use kv.cpu_tier_bytes and kv.redis_url"
_RUNNER_V2 = "it needs vLLM's model runner V2, which answers a failed layerwise load with wrong tokens"
_LOGGING = "vLLM's set-up of logging would end Serve's log; use http.log_format, or VLLM_LOGGING_LEVEL outside"
_REPLACED = "crosskv knows vLLM's own by its internals, and with another one KV could be stored before it is computed"

UNSAFE: Mapping[str, tuple[object, str]] = {
    "async_scheduling": (False, "tokens of a step under way would count as computed, and noise would be stored as KV"),
    "scheduler_cls": (None, _REPLACED),
    "worker_cls": ("auto", _REPLACED),
    "worker_extension_cls": ("", _REPLACED),
    "prefix_match_unit": (None, "KV is named block by block; use engine.block_size_tokens"),
    "scheduling_policy": ("fcfs", "clients choose their own `priority`, so any of them could overtake all others"),
    "enable_prompt_embeds": (False, "KV is named by tokens, and embeddings are none"),
    "kv_offloading_size": (None, _OTHER_STORE),
    "kv_offloading_backend": ("native", _OTHER_STORE),
    "ec_transfer_config": (None, _OTHER_STORE),
    "logging_config": (None, _LOGGING),
    "log_level": (None, _LOGGING),
    "log_config_file": (None, _LOGGING),
    "weight_transfer_config": (None, "weights that change while the server runs would give two KVs one name"),
    "watermark_config": (None, _RUNNER_V2),
    "diffusion_config": (None, _RUNNER_V2),
    "disable_log_stats": (False, "how long prompts take is measured by it, and scaling and /metrics need that"),
    "enable_lora": (False, _OWN_LORA),
    "default_mm_loras": (None, _MEDIA_LORA),
    "pipeline_parallel_size": (1, _ONE_PROCESS),
    "prefill_context_parallel_size": (1, _ONE_PROCESS),
    "decode_context_parallel_size": (1, _ONE_PROCESS),
    "data_parallel_size": (1, _ONE_PROCESS),
    "data_parallel_size_local": (None, _ONE_PROCESS),
    "data_parallel_rank": (None, _ONE_PROCESS),
    "data_parallel_start_rank": (None, _ONE_PROCESS),
    "data_parallel_address": (None, _ONE_PROCESS),
    "data_parallel_rpc_port": (None, _ONE_PROCESS),
    "data_parallel_hybrid_lb": (False, _ONE_PROCESS),
    "data_parallel_external_lb": (False, _ONE_PROCESS),
    "data_parallel_multi_port_external_lb": (False, _ONE_PROCESS),
    "data_parallel_backend": ("mp", _ONE_PROCESS),
    "distributed_executor_backend": (None, _ONE_PROCESS),
    "nnodes": (1, _ONE_PROCESS),
    "node_rank": (0, _ONE_PROCESS),
    "enable_elastic_ep": (False, _ONE_PROCESS),
    "enable_fault_tolerance": (False, _ONE_PROCESS),
}
"""What holds anyway, and may be said, and why nothing else is taken."""

NEUTRAL = frozenset(
    {
        # the tokenizer and what becomes of logits: KV is a function of token ids
        "tokenizer_mode",
        "tokenizer_revision",
        "skip_tokenizer_init",
        "logits_processors",
        "max_logprobs",
        "seed",
        "logprobs_mode",
        "return_sampling_mask",
        "structured_outputs_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "reasoning_config",
        "allowed_local_media_path",
        "allowed_media_domains",
        "renderer_num_workers",
        "io_processor_plugin",
        # scheduling order: other requests change a step's composition as well
        "max_num_scheduled_tokens",
        "max_num_active_seqs",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "enable_chunked_prefill",
        "disable_chunked_mm_input",
        "scheduler_reserve_full_isl",
        "prefill_schedule_interval",
        "watermark",
        "stream_interval",
        "shutdown_timeout",
        # memory and how weights are read, not which
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "revision",  # the commit that it means is in the identity
        "download_dir",
        "hf_token",
        "safetensors_load_strategy",
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
        "max_parallel_loading_workers",
        "pt_load_map_location",
        "use_tqdm_on_load",
        "numa_bind",
        "numa_bind_nodes",
        "numa_bind_cpus",
        "device_ids",
        "distributed_timeout_seconds",
        "cpu_distributed_timeout_seconds",
        "master_addr",
        "master_port",
        # what is counted and logged
        "show_hidden_metrics_for_version",
        "otlp_traces_endpoint",
        "collect_detailed_traces",
        "per_request_spec_decode_metrics",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "custom_histogram_buckets",
        "cudagraph_metrics",
        "enable_layerwise_nvtx_tracing",
        "enable_mfu_metrics",
        "enable_logging_iteration_details",
        "jit_monitor_mode",
        "jit_monitor_verbose",
        "enable_mm_processor_stats",
        "aggregate_engine_logging",
        "profiler_config",
        "enable_log_requests",
        "ray_workers_use_nsight",
        "fail_on_environ_validation",
    }
)


def check_extra_args(args: Mapping[str, Any]) -> None:
    """Raise ValueError, saying what would work, for the first name that vLLM does not know or that is not free."""
    known = engine_argument_names()
    for name, value in args.items():
        if name in OWNED:
            raise ValueError(f"{name!r} has a setting of its own; use {OWNED[name]!r}")
        if name in UNSAFE:
            harmless, reason = UNSAFE[name]
            if value is not None and value != harmless:
                raise ValueError(f"{name!r} cannot be changed: {reason}")
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "docs.vllm.ai lists its engine arguments"
            raise ValueError(f"vLLM knows no argument {name!r}; {hint}")


def that_may_change_kv(args: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `engine.extra_args` that belongs to the model's identity."""
    return {
        name: value
        for name, value in args.items()
        if name not in NEUTRAL and name not in OWNED and name not in UNSAFE and value is not None
    }


@functools.cache
def engine_argument_names() -> frozenset[str]:
    """Every field of AsyncEngineArgs; empty, to refuse nothing, where vLLM is absent or looks different."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        module = ast.parse((Path(spec.origin).parent / _SOURCE).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    return frozenset(
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
