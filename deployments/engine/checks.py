"""What a built engine configuration must say, so that no two KVs share a name and none is stored before it is computed.

`unsupported_kv` says which models keep KV in a form that crosskv does not move. They are served with vLLM's own prefix
cache; what this does not see, `deployments.engine.groups.read_groups` sees once the model is loaded.

`configs.engine_arguments` refuses the same by name when the settings are read. Here the result counts, whatever led to
it: vLLM's defaults, its platforms, environment variables.

Leans on vLLM, `vllm.config.VllmConfig`; `tests/deployments/engine/test_engine_checks.py` builds real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FULL_ATTENTION = frozenset({"attention", "full_attention"})
_WINDOWS = frozenset({"sliding_attention"})
_STATES = frozenset({"linear_attention", "mamba", "hybrid", "conv"})
"""Layers with a state at the end of a step; hybrid ones attend to everything, too."""
_NO_KV = frozenset({"mlp", "moe"})
"""Layers that keep nothing, where a configuration lists them."""
_STATE_SHAPES = ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "conv_L_cache")
"""What only configurations with gated delta nets, Mamba 2 or short convolutions have: others no test has moved."""
_OTHER_STATES = frozenset({"mamba", "conv", "recurrent"})
_OUR_SCHEDULERS = "deployments.engine."
PLAIN_KV = frozenset({"auto", "bfloat16", "float16", "float32", "half", "float"})
FP8_KV = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
"""Types of one byte an element, with scales for a whole layer: those of the checkpoint, which are weights, or 1."""


def check_engine_config(config: VllmConfig) -> None:
    """Raise ValueError, in words, for the first thing that the connector's exactness does not bear."""
    for wrong in _defects(config):
        raise ValueError(f"vLLM's configuration does not keep KV exact: {wrong}")


def _defects(config: VllmConfig) -> Iterator[str]:
    parallel, scheduler, cache, transfer = (
        config.parallel_config, config.scheduler_config, config.cache_config, config.kv_transfer_config,
    )  # fmt: skip
    if parallel.world_size != parallel.tensor_parallel_size or parallel.data_parallel_size != 1:
        yield (
            "a replica's engine computes all layers of all its requests; set pipeline_parallel_size, "
            "prefill_context_parallel_size and data_parallel_size to 1, and raise `replicas`"
        )
    elif parallel.decode_context_parallel_size != 1:
        yield "ranks would keep the KV of different tokens; set decode_context_parallel_size to 1"
    if parallel.world_size > 1 and (parallel.distributed_executor_backend != "mp" or parallel.nnodes != 1):
        yield (
            f"the ranks of a model must be processes of one node, and not {parallel.distributed_executor_backend}'s on "
            f"{parallel.nnodes}; leave distributed_executor_backend and nnodes out of engine.extra_args"
        )
    if scheduler.async_scheduling or config.max_concurrent_batches > 1:
        yield (
            "steps overlap, and tokens of a step under way would count as computed; leave async_scheduling out of "
            "engine.extra_args"
        )
    if config.use_v2_model_runner:
        yield (
            "vLLM chose its model runner V2, which answers a failed layerwise load with wrong tokens; set "
            "VLLM_USE_V2_MODEL_RUNNER=0, and leave features that need V2 out of engine.extra_args"
        )
    named = scheduler.scheduler_cls
    own_scheduler = named is None or (isinstance(named, str) and named.startswith(_OUR_SCHEDULERS))
    if not own_scheduler or not parallel.worker_cls.startswith("vllm.v1.worker."):
        yield (
            f"the scheduler ({named}) or the worker ({parallel.worker_cls}) is not vLLM's own, or ours; leave "
            "scheduler_cls and worker_cls out of engine.extra_args, and uninstall vLLM plug-ins that bring their own"
        )
    if cache.enable_prefix_caching and cache.prefix_caching_hash_algo != "sha256_cbor":
        yield (
            f"blocks are hashed by {cache.prefix_caching_hash_algo}, not by sha256_cbor, so the ingress and the engine "
            "would name them differently"
        )
    if transfer is not None and transfer.kv_connector != "CrossKVConnector":
        yield (
            f"{transfer.kv_connector} has taken the place of crosskv's connector; leave kv_offloading_size out of "
            "engine.extra_args"
        )
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        yield f"a failed load must be recomputed, not be answered by {transfer.kv_load_failure_policy!r}"


def unsupported_kv(config: VllmConfig) -> Iterator[str]:
    """Why a model's KV cannot be shared, in words: what its layers keep is not described, or its KV is quantized."""
    model, cache_dtype = config.model_config, config.cache_config.cache_dtype
    text = model.hf_text_config
    layers = set(getattr(text, "layer_types", None) or ())
    if (model.is_hybrid or model.is_attention_free or layers & _OTHER_STATES) and not keeps_states(config):
        yield (
            "the model has layers with a state instead of KV (hybrid or state-space), and no test has moved states of "
            "this kind"
        )
    if model.use_mla:
        yield from _unsupported_latents(config)
    others = layers - _FULL_ATTENTION - _WINDOWS - _STATES - _NO_KV
    if others or model.attention_chunk_size:
        kinds = ", ".join(sorted(others)) or "chunks"
        yield f"the model does not attend to its context, or to the last tokens of it, in every layer ({kinds})"
    if model.is_encoder_decoder:
        yield "the model has an encoder"
    if cache_dtype not in PLAIN_KV | FP8_KV:
        yield f"its KV cache is kept as {cache_dtype}, whose scales are not stored with it"
    if keeps_states(config):
        yield from _unsupported_states(config)
    if attends_to_windows(config) and cache_dtype in FP8_KV:
        yield f"the model attends to windows, and no test has moved these as {cache_dtype}"


def untested_over_ranks(config: VllmConfig) -> Iterator[str]:
    """Why the KV of a model that is spread over several ranks cannot be shared, in words; nothing for one rank."""
    ranks = config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return
    for is_so, what in (
        (attends_to_windows(config), "attends to windows"),
        (keeps_states(config), "has states"),
        (config.cache_config.cache_dtype in FP8_KV, f"keeps its KV as {config.cache_config.cache_dtype}"),
        (config.lora_config is not None, "has LoRA adapters"),
        (config.speculative_config is not None, "speculates"),
        (config.model_config.use_mla, "keeps latents (MLA), of which each rank has all"),
        (config.model_config.get_total_num_kv_heads() < ranks, "has fewer KV heads than ranks"),
    ):
        if is_so:
            yield (
                f"the model {what}, which no test has moved over {ranks} ranks; set engine.tensor_parallel_size to 1 "
                "to share KV"
            )


def _unsupported_latents(config: VllmConfig) -> Iterator[str]:
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        yield (
            "the model keeps latents (MLA), and vLLM has no prefix cache of these on this platform; it has with AMX, "
            "or on a GPU"
        )
    if cache.cache_dtype not in PLAIN_KV:
        yield f"the model keeps latents (MLA), and no test has moved these as {cache.cache_dtype}"
    if attends_to_windows(config):
        yield "the model has latents (MLA) and windows, which no test has moved together"


def _unsupported_states(config: VllmConfig) -> Iterator[str]:
    cache, speculation = config.cache_config, config.speculative_config
    if attends_to_windows(config):
        yield "the model has states and windows, which no test has moved together"
    if cache.cache_dtype in FP8_KV:
        yield f"the model has states, and no test has moved these with KV as {cache.cache_dtype}"
    if speculation is not None:
        yield "the model's states are moved while drafts are tried; leave speculative_config out of engine.extra_args"


def keeps_states(config: VllmConfig) -> bool:
    """Whether some layers keep a state of a kind that is moved, and all others attend to everything or to windows."""
    text = config.model_config.hf_text_config
    layers = set(getattr(text, "layer_types", None) or ())
    if not any(getattr(text, shape, None) for shape in _STATE_SHAPES):
        return False  # Mamba's first version has layers of the same name
    return bool(config.model_config.is_hybrid) and layers <= _FULL_ATTENTION | _WINDOWS | _STATES | _NO_KV


def attends_to_windows(config: VllmConfig) -> bool:
    """Whether some layers attend to the last tokens only: vLLM then chooses the sizes of the device's pool."""
    model = config.model_config
    layers = set(getattr(model.hf_text_config, "layer_types", None) or ())
    return bool(model.get_sliding_window()) or bool(layers & _WINDOWS)
