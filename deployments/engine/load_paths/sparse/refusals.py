"""Where vLLM cannot attend to a sparse prefix exactly, in words.

Leans on vLLM, `VllmConfig`: `compilation_config.cudagraph_mode.has_full_cudagraphs`, `use_v2_model_runner`,
`speculative_config`, `parallel_config`, `model_config`; and of a built model runner `attn_groups`, `input_batch` and
`compilation_config.static_forward_context`, whose attention layers have `impl.alibi_slopes`, `impl.sliding_window` and
`kv_sharing_target_layer_name`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deployments.engine.checks import PLAIN_KV, attends_to_windows, unsupported_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXACT_BACKENDS = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"})
"""Their metadata is a value: several may be built in one step. Others plan into buffers of their builder."""


def why_not(config: VllmConfig) -> str | None:
    """The first reason why an engine of this configuration cannot attend to sparse prefixes; None: it can.

    What shows only in a built engine, `why_not_built` says.
    """
    return next(_reasons(config), None)


def why_not_built(runner: Any) -> str | None:
    """The same of a built model runner, vLLM's `GPUModelRunner` or the one for CPUs."""
    return next(_built_reasons(runner), None)


def _reasons(config: VllmConfig) -> Iterator[str]:
    parallel, model = config.parallel_config, config.model_config
    graphs = config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.has_full_cudagraphs():
        yield (
            "a full CUDA graph holds the attention metadata of its capture; set "
            "compilation_config.cudagraph_mode to PIECEWISE in engine.extra_args, or engine.enforce_eager"
        )
    if config.use_v2_model_runner:
        yield "vLLM's model runner V2 makes its attention metadata elsewhere; set VLLM_USE_V2_MODEL_RUNNER=0"
    if config.speculative_config is not None:
        yield "a draft model would attend to dropped keys; leave speculative_config out of engine.extra_args"
    if (
        parallel.world_size != 1
        or parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1
    ):
        yield "each rank would have to be told; set tensor, pipeline and context parallelism to 1"
    if parallel.num_ubatches > 1:
        yield "a step in micro-batches has several attention metadata; leave enable_dbo out of engine.extra_args"
    if model.is_mm_prefix_lm or model.rswa_window is not None:
        yield "the model attends by places in its prompt, which are not those of kept keys"
    if not config.cache_config.enable_prefix_caching:
        yield "without a prefix cache there is nothing to present; leave enable_prefix_caching out of engine.extra_args"
    if config.cache_config.cache_dtype not in PLAIN_KV:
        yield f"its KV cache is kept as {config.cache_config.cache_dtype}, of whose elements nothing is known here"
    if config.lora_config is not None:
        yield "which keys an adapter would keep has not been tried"
    if model.use_mla:
        yield "the model's attention is latent (MLA), which has no keys to drop"
    yield from unsupported_kv(config)
    if attends_to_windows(config):
        yield "the model attends to windows, which have no places for dropped keys"


def _built_reasons(runner: Any) -> Iterator[str]:
    groups = [group for of_cache in runner.attn_groups for group in of_cache]
    if len(groups) != 1:
        yield f"the model has {len(groups)} kinds of attention layers, and not one"
    for group in groups:
        if group.backend.get_name() not in EXACT_BACKENDS:
            yield f"attention backend {group.backend.get_name()} is none of {', '.join(sorted(EXACT_BACKENDS))}"
        layers = runner.compilation_config.static_forward_context
        for layer in [layers[name] for name in group.layer_names if name in layers]:
            if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
                yield "the model's layers share KV with each other"
            elif getattr(layer.impl, "alibi_slopes", None) is not None:
                yield "the model weighs keys by their distance (ALiBi), which a shifted table changes"
            elif getattr(layer.impl, "sliding_window", None) not in (None, -1, (-1, -1)):
                yield "the model attends in sliding windows, which a shifted table moves"
    if runner.input_batch.block_table[0].block_size != runner.vllm_config.cache_config.block_size:
        yield "the attention kernel's blocks are smaller than vLLM's"
