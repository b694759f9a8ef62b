"""What the deployments lean on inside vLLM, name by name, so that an upgrade fails here and says where to look."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm
from live_engine import LiveEngine
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM, EngineCoreClient
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from deployments.engine.connector import CrossKVConnector
from deployments.engine.host import InProcessClient
from deployments.engine.process.surroundings import no_states_inside_a_step

SIGNATURES: list[tuple[Callable[..., Any], list[str]]] = [
    (EngineCore.__init__, ["vllm_config", "executor_class", "log_stats"]),
    (EngineCore.preprocess_add_request, ["request"]),
    (EngineCore.add_request, ["request", "request_wave"]),
    (EngineCore.abort_requests, ["request_ids"]),
    (EngineCore.post_step, ["model_executed"]),
    (EngineCore.get_supported_tasks, []),
    (EngineCore.reset_prefix_cache, ["reset_running_requests", "reset_connector"]),
    (EngineCore.shutdown, []),
    (EngineCoreClient.make_async_mp_client, ["vllm_config", "executor_class", "log_stats"]),
    (AsyncLLM.__init__, ["vllm_config", "executor_class", "log_stats"]),
    (AsyncLLM.generate, ["prompt", "sampling_params", "request_id"]),
    (Executor.get_class, ["vllm_config"]),
    (BlockPool.touch, ["blocks"]),
    (BlockPool.free_blocks, ["ordered_blocks"]),
    (BlockPool.evict_blocks, ["block_ids"]),
    (BlockPool.get_cached_block, ["block_hash", "kv_cache_group_ids"]),
    (BlockPool.get_new_blocks, ["num_blocks"]),
    (BlockPool._insert_block_hash, ["block_hash_with_group_id", "block", "num_tokens"]),
    (make_block_hash_with_group_id, ["block_hash", "group_id"]),
    (KVCacheManager.get_block_ids, ["request_id"]),
    (KVCacheManager.take_events, []),
    (KVConnectorBase_V1.__init__, ["vllm_config", "role", "kv_cache_config"]),
    (KVConnectorBase_V1.get_num_new_matched_tokens, ["request", "num_computed_tokens"]),
    (KVConnectorBase_V1.update_state_after_alloc, ["request", "blocks", "num_external_tokens"]),
    (KVConnectorBase_V1.build_connector_meta, ["scheduler_output"]),
    (KVConnectorBase_V1.update_connector_output, ["connector_output"]),
    (KVConnectorBase_V1.request_finished, ["request", "block_ids"]),
    (KVConnectorBase_V1.get_finished, ["finished_req_ids"]),
    (KVConnectorBase_V1.get_block_ids_with_load_errors, []),
    (KVConnectorBase_V1.register_kv_caches, ["kv_caches"]),
    (KVConnectorBase_V1.bind_kv_cache_manager, ["kv_cache_manager"]),
    (KVConnectorBase_V1.on_new_request, ["request"]),
    (dispatcher._rebind_kernels, ["overrides"]),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_function_still_takes_what_we_pass(function: Callable[..., Any], expected: list[str]) -> None:
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    assert found[: len(expected)] == expected, (
        f"vllm {vllm.__version__} changed {function.__qualname__}{inspect.signature(function)}; "
        f"it began with {expected}"
    )


def test_the_client_has_everything_that_async_llm_asks_of_it() -> None:
    source = inspect.getsource(AsyncLLM)
    used = {"get_output_async", "add_request_async", "abort_requests_async", "shutdown", "resources"}
    for name in sorted(used):
        assert f"engine_core.{name}" in source, f"vllm {vllm.__version__}: AsyncLLM no longer uses engine_core.{name}"
        assert name == "resources" or hasattr(InProcessClient, name)


@pytest.mark.parametrize(
    "name",
    ["block_hashes", "num_computed_tokens", "num_prompt_tokens", "num_tokens", "kv_transfer_params", "mm_features"],
)
def test_a_request_has_what_the_connector_reads(name: str) -> None:
    text = inspect.getsource(Request)
    assert f"self.{name}" in text or f"def {name}" in text, f"vllm {vllm.__version__}: Request has no {name}"


def test_cache_events_carry_block_hashes() -> None:
    for event in (BlockStored, BlockRemoved):
        assert "block_hashes" in event.__struct_fields__, f"vllm {vllm.__version__} changed {event.__name__}"
    assert "parent_block_hash" in BlockStored.__struct_fields__, f"vllm {vllm.__version__} changed BlockStored"


def test_a_planned_step_says_what_it_computes() -> None:
    fields = set(SchedulerOutput.__dataclass_fields__)
    assert {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"} <= fields
    assert {"req_id", "num_computed_tokens"} <= set(NewRequestData.__dataclass_fields__)
    assert {"req_ids", "num_computed_tokens"} <= set(CachedRequestData.__dataclass_fields__)


def test_a_built_engine_has_the_parts_that_reuse_reaches_for(engine: LiveEngine) -> None:
    core = engine.thread.core
    assert core.async_scheduling is False, "the connector reads num_computed_tokens as written KV"
    assert callable(core.step_fn)
    assert core.scheduler.schedule.__name__ == "watched", "the heartbeat hears what a step computes"
    assert isinstance(engine.scheduler.connector, CrossKVConnector)
    assert isinstance(get_kv_transfer_group(), CrossKVConnector)
    assert engine.scheduler.connector.kv_cache_manager is engine.scheduler.kv_cache_manager
    assert hasattr(engine.scheduler, "kv_event_publisher")
    assert (
        engine.on_engine_thread(engine.reuse.control.usage)["blocks"]
        == engine.llm.vllm_config.cache_config.num_gpu_blocks_override
    )


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU backend's private function")
def test_the_cpu_backend_says_which_layout_it_uses() -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    found = list(inspect.signature(_get_attn_isa).parameters)[:4]
    assert found == ["dtype", "block_size", "head_size", "kv_cache_dtype"], (
        f"vllm {vllm.__version__} changed _get_attn_isa{inspect.signature(_get_attn_isa)}"
    )


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU backend's kernel")
def test_the_cpu_kernel_of_mamba_2_gives_no_state_inside_a_step() -> None:
    """Else `no_states_inside_a_step` is to go, and `deployments.engine.groups` to take such states."""
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    tokens, heads, size, state = 8, 2, 4, 4
    x, b = torch.ones(tokens, heads, size), torch.ones(tokens, 1, state)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    found = mamba_chunk_scan_combined_varlen(
        x, torch.ones(tokens, heads), -torch.ones(heads), b, b, chunk_size=4, cu_seqlens=ends,
        cu_chunk_seqlens=torch.tensor([0, 4, tokens], dtype=torch.int32),
        last_chunk_indices=torch.tensor([1], dtype=torch.int32), seq_idx=torch.zeros(2, dtype=torch.int32),
        out=torch.empty_like(x), return_intermediate_states=True,
    )  # fmt: skip
    assert found.shape[0] == 1, f"vllm {vllm.__version__} returns the states of both chunks"


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU's kernel gives such states")
def test_layers_of_mamba_2_offer_no_state_inside_a_step_once_an_engine_is_to_be_built() -> None:
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    no_states_inside_a_step()
    assert MambaMixer2.get_kv_cache_spec is MambaBase.get_kv_cache_spec
    assert "num_prefill_checkpoint_blocks" not in inspect.getsource(MambaBase.get_kv_cache_spec)
