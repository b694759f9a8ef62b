"""A replica that answers as long, and with as many log probabilities, as it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fake_backend import say, speak
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from deployments.protocol.wire import GenerateRequest


async def speak_at_length(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """As many tokens and candidates as the request wants; as `speak` where it wants no log probabilities."""
    params = request.sampling_params
    if params.logprobs is None and params.prompt_logprobs is None:
        async for output in speak(request):
            yield output
        return
    steps = params.max_tokens if params.output_kind == RequestOutputKind.DELTA else 1
    for step in range(steps):
        yield await asyncio.to_thread(_said, request, params.max_tokens // steps, step == steps - 1)


def _said(request: GenerateRequest, tokens: int, finished: bool) -> RequestOutput:
    params = request.sampling_params
    output = say(request, [10], "", finished=finished)
    wanted = params.logprobs
    logprobs: Any = [_candidates(wanted) for _ in range(tokens)] if wanted is not None else None
    output.outputs = [
        CompletionOutput(
            number, " a" * tokens, [10] * tokens, None, logprobs, finish_reason="length" if finished else None
        )
        for number in range(params.n)
    ]
    if params.prompt_logprobs is not None:
        output.prompt_logprobs = [None, *(_candidates(params.prompt_logprobs) for _ in request.prompt_token_ids[1:])]
    return output


def _candidates(most_likely: int) -> dict[int, Logprob]:
    return {token: Logprob(-0.5 - token, token, f"<{token}>") for token in range(10, 11 + most_likely)}
