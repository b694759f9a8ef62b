"""From crosskv's settings to vLLM's arguments and configuration.

The ingress and every replica build the same `VllmConfig` from the same settings, so that they agree on the fingerprint
without asking each other. The ingress's is in the keys, a replica's in the segments: where they disagree, a load is a
counted mismatch, and the manager says so when a replica registers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs.lora_adapters import require_adapter, served_rank
from configs.model_folder import find_model, own_max_tokens
from configs.settings import Settings
from deployments.engine.checks import FP8_KV, attends_to_windows, keeps_states, unsupported_kv
from deployments.engine.model_identity import why_apart, why_not_shared
from deployments.engine.scheduling.options import scheduling_arguments

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

logger = logging.getLogger(__name__)

JSON_WHITESPACE = "crosskv_json_whitespace"
"""Of `VllmConfig.additional_config`, for `deployments.engine.grammars.by_tenant`."""
MAX_LORAS = 4
"""Different adapters in one step, where `engine.extra_args` does not say. It is a part of the KV's identity, so it does
not follow how many there are: another adapter must not make all KV cold."""
SCHEDULER = "deployments.engine.resume.scheduler.ResumingScheduler"


def engine_environment(settings: Settings) -> Mapping[str, str]:
    """Environment variables that a process needs before it imports vLLM."""
    environment = {
        "OMP_NUM_THREADS": str(settings.engine.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        # Runner V2, vLLM's choice on CUDA, computes from the wrong position after a failed layerwise load (vllm#49250).
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # A process group of one still listens, where the host's name points unless told: in a container, the network.
        "GLOO_SOCKET_IFNAME": "lo",
        # Its set-up closes each handler of the process, Serve's among them: `deployments.protocol.log_lines` does it.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_LOGGING_CONFIG_PATH": "",  # with a file, vLLM refuses to be imported without its set-up
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.engine.tensor_parallel_size > 1:
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would have this process's threads and locks
    if settings.engine.enforce_eager:
        # vLLM's sampler has parts under torch.compile even so: the first request with logprobs waited half a minute.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def engine_args(settings: Settings) -> AsyncEngineArgs:
    """vLLM's engine arguments for `settings`. Imports vLLM."""
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    args: dict[str, Any] = {
        "model": settings.model_source,
        "served_model_name": [settings.model_name],
        "dtype": settings.engine_dtype,
        "max_model_len": _max_model_len(settings),
        "trust_remote_code": settings.trust_remote_code,
        "block_size": settings.block_size_tokens,
        "num_gpu_blocks_override": settings.device_blocks,
        "max_num_seqs": settings.engine.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enforce_eager": settings.engine.enforce_eager,
        "tensor_parallel_size": settings.engine.tensor_parallel_size,
        # vLLM's own choice would be Ray in some of Ray's actors, whose workers may lie on another node.
        "distributed_executor_backend": "mp" if settings.engine.tensor_parallel_size > 1 else None,
        "enable_prefix_caching": settings.kv.enabled,
        "prefix_caching_hash_algo": "sha256_cbor",
        # The connector reads a request's computed tokens as tokens whose KV is written; that holds only without it.
        "async_scheduling": False,
        "scheduler_cls": SCHEDULER,
        "enable_prompt_tokens_details": True,
        "reasoning_parser": settings.engine.reasoning_parser,  # where constraints of an answer begin
    }
    if settings.kv.enabled:
        args["kv_transfer_config"] = KVTransferConfig(
            kv_connector="CrossKVConnector",
            kv_connector_module_path="deployments.engine.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )
        args["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    args.update(_lora_arguments(settings))
    args.update(settings.engine.extra_args)
    args.update(scheduling_arguments(settings, args))
    bound = {JSON_WHITESPACE: settings.engine.json_whitespace}
    args["additional_config"] = {**(args.get("additional_config") or {}), **bound}
    known = set(AsyncEngineArgs.__dataclass_fields__)
    return AsyncEngineArgs(**{name: value for name, value in args.items() if name in known and value is not None})


def _lora_arguments(settings: Settings) -> dict[str, Any]:
    """Raises ValueError for a folder that holds no adapter."""
    adapters = settings.engine.lora_adapters.values()
    if not adapters:
        return {}
    max_loras = int(settings.engine.extra_args.get("max_loras") or MAX_LORAS)
    return {
        "enable_lora": True,
        "max_loras": max_loras,
        "max_cpu_loras": max(len(adapters), max_loras),
        "max_lora_rank": served_rank([require_adapter(adapter.folder)[0] for adapter in adapters]),
    }


def _max_model_len(settings: Settings) -> int:
    """The setting, or the model's own limit, shortened to what the device pool holds."""
    from vllm.config import ModelConfig

    own = own_max_tokens(find_model(settings.model))
    if own is None and settings.max_model_len is None:
        own = ModelConfig(model=settings.model_source, trust_remote_code=settings.trust_remote_code).max_model_len
    return settings.longest_request_tokens(own or 0)


def engine_config(settings: Settings) -> VllmConfig:
    """The engine's complete configuration. Reads the model's config files, loads no weights. Imports vLLM.

    It has no KV connector where KV is not to be shared: by the settings, or because it cannot be named or moved. Then
    each replica keeps vLLM's own prefix cache.
    """
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    args = engine_args(settings)
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    other_kv = attends_to_windows(config) or keeps_states(config)
    if settings.kv.enabled and (why := why_not_shared(config) or why_apart(settings)):
        args.kv_transfer_config = args.kv_events_config = None
        if any(unsupported_kv(config)):
            other_kv, args.enable_prefix_caching = True, None  # vLLM's own choice for such a model
        if other_kv:
            args.num_gpu_blocks_override = None  # its blocks have other sizes: the pool has the same bytes instead
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        kept = "its own prefix cache only" if config.cache_config.enable_prefix_caching else "none, as vLLM has it here"
        logger.warning("KV is not shared, each replica keeps %s: %s", kept, why)
    elif other_kv:
        config.cache_config.num_gpu_blocks_override = None
    cache = config.cache_config
    if (current_platform.is_cpu() or other_kv) and settings.device_blocks and cache.kv_cache_memory_bytes is None:
        # Without it the CPU backend reserves a share of the whole machine's memory, once per replica.
        ranks = config.parallel_config.tensor_parallel_size
        cache.kv_cache_memory_bytes = settings.device_blocks * block_bytes(config) // ranks
    return config


def block_bytes(config: VllmConfig) -> int:
    """Bytes of KV that a block holds, in all layers of all ranks. Several ranks may hold the same head."""
    model, parallel = config.model_config, config.parallel_config
    dtype: Any = model.dtype
    element_bytes = 1 if config.cache_config.cache_dtype in FP8_KV else dtype.itemsize
    halves = 1 if model.use_mla else 2  # a latent is no key and no value, but what both are made of
    per_token = halves * model.get_num_kv_heads(parallel) * model.get_head_size() * element_bytes
    per_rank = model.get_num_layers(parallel) * per_token * config.cache_config.block_size
    return per_rank * parallel.tensor_parallel_size
