"""A continued request in vLLM's model runner: known there before its first step, as a preempted one is.

A seeded request's generator stands where it would after as many tokens. On a CPU vLLM draws one integer a token
(`TopKTopPSampler.forward_cpu`), on CUDA four words of the generator's stream, by which it turns one back, too.

Leans on vLLM: `GPUModelRunner.requests`, which `_update_states` reads for a resumed request and from which
`finished_req_ids` removes one that never ran; `CachedRequestState`; `SamplingParams.sampling_type`;
`runner.sampler.topk_topp_sampler` with `forward` and `use_fp64_gumbel`; `Executor.collective_rpc`, for each rank has a
runner.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from deployments.engine.resume.scheduler import ResumingScheduler

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_CUDA_OFFSET = 4
"""What a token takes of a CUDA generator's stream (vLLM's `_bookkeeping_sync` turns back as much)."""


def let_requests_resume(core: EngineCore) -> None:
    """Open the scheduler's entrance for continued requests. On the engine thread, before the first step."""
    scheduler: Any = core.scheduler
    if isinstance(scheduler, ResumingScheduler):
        scheduler.enter_runner = partial(_enter, core.model_executor)
    else:
        logger.warning("answers cannot be continued here: the engine's scheduler is %s", type(scheduler).__name__)


def _enter(executor: Executor, request: Request) -> None:
    """In every rank. Raises ValueError, of ranks that are processes RuntimeError, where the generator cannot be brought
    to where it was."""
    assert request.sampling_params is not None
    state = CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )
    enter: Any = _enter_rank  # vLLM types functions of the worker alone
    executor.collective_rpc(enter, args=(state,))


def _enter_rank(worker: Any, state: CachedRequestState) -> None:
    runner, params = worker.worker.model_runner, state.sampling_params
    assert params is not None
    if params.sampling_type == SamplingType.RANDOM_SEED and params.seed is not None:
        state.generator = _generator(runner, params.seed, len(state.output_token_ids))
    runner.requests[state.req_id] = state


def _generator(runner: Any, seed: int, drawn: int) -> torch.Generator:
    sampler = runner.sampler.topk_topp_sampler
    device = torch.device(runner.device)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    if device.type == "cuda":
        generator.set_offset(generator.get_offset() + _CUDA_OFFSET * drawn)
    elif device.type == "cpu" and sampler.forward.__name__ == "forward_cpu" and not sampler.use_fp64_gumbel:
        for _ in range(drawn):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    else:
        raise ValueError(f"how a seeded request draws on {device.type} is not known here")
    return generator
