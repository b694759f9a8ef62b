"""Answers with log probabilities: bounded by number, and made on a thread.

vLLM makes an object of each log probability, and JSON of that, after an answer has ended: 50,000 of them took seconds
of the event loop. Their number is known before a prompt is sent: answers times tokens times candidates. Of a stream
only what comes in one event counts.

Leans on vLLM: once its outputs have ended, `chat_completion_full_generator` and `responses_full_generator` wait for
nothing. `tests/app/loop/test_large_answers.py` holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from app.gate.request_context import RequestContext, current_request

MOST_LOGPROBS = 16_384
"""Of one prompt's answers and of its own tokens: what one message of a replica brings at once. Reading that message,
and one walk of Python's collector through what is made of it, take some 20 ms each, and stop all threads."""
MOST_OF_A_REQUEST = 2 * MOST_LOGPROBS
"""Of all prompts of one request."""
LARGE = 500
"""Log probabilities from which on an answer is made on a thread."""
_MANY_ANSWERS = 16

Output = TypeVar("Output")
Answer = TypeVar("Answer")


def bound_logprobs(context: RequestContext, params: SamplingParams, prompt_tokens: int) -> None:
    """Count what one more prompt's answers will bring. An answer whose length the client leaves open is cut to fit.

    Raises VLLMValidationError (400) for more than `MOST_LOGPROBS`, or for more than `MOST_OF_A_REQUEST` together.
    """
    context.sequences += params.n
    of_token = _candidates(params.logprobs, params.logprob_token_ids)
    of_prompt = prompt_tokens * _candidates(params.prompt_logprobs, None)
    if not of_token and not of_prompt:
        return
    asked = params.max_tokens or 0
    at_once = asked if context.tokens_at_once is None else min(asked, context.tokens_at_once)
    room = min(MOST_LOGPROBS, MOST_OF_A_REQUEST - context.logprobs) - of_prompt
    fits = room // (params.n * of_token) if of_token else asked
    if room < 0 or at_once > fits:
        if context.max_tokens is not None or context.tokens_at_once is not None or fits < max(params.min_tokens, 1):
            raise VLLMValidationError(
                f"The answer would hold more than {MOST_LOGPROBS} log probabilities, which are `n` times tokens times "
                f"candidates and those of the prompt, or the request's prompts together more than {MOST_OF_A_REQUEST}. "
                "Ask for fewer tokens, candidates or answers, or for a stream.",
                parameter="logprobs" if of_token else "prompt_logprobs",
            )
        params.max_tokens = at_once = fits
    context.logprobs += of_prompt + params.n * of_token * at_once


def _candidates(most_likely: int | None, named: list[int] | None) -> int:
    """Log probabilities of one token: its own and the others that are wanted."""
    if most_likely is None and not named:
        return 0
    return 1 + max(most_likely or 0, len(named or ()))


def is_large() -> bool:
    """Whether making the current request's answer would hold up the loop."""
    context = current_request()
    return context.logprobs > LARGE or context.sequences > _MANY_ANSWERS


async def after(outputs: AsyncIterator[Output]) -> AsyncIterator[Output]:
    """Wait for the end of `outputs`; return an iterator of the last one alone, which waits for nothing."""
    last: list[Output] = []
    async for output in outputs:
        last = [output]
    answers = [answer for output in last for answer in getattr(output, "outputs", ())]
    current_request().cut = frozenset(answer.index for answer in answers if answer.finish_reason == "length")

    async def replay() -> AsyncIterator[Output]:
        for output in last:
            yield output

    return replay()


async def made(answer: Coroutine[Any, Any, Answer]) -> Answer:
    """What a coroutine returns that waits for nothing; run on a thread if it is the current request's large answer."""
    return await asyncio.to_thread(_run, answer) if is_large() else await answer


def _run(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    try:
        coroutine.send(None)
    except StopIteration as ended:
        answer: Answer = ended.value
        return answer
    coroutine.close()
    raise RuntimeError("an answer waits for something after its outputs have ended")


async def json_response(answer: BaseModel, *, by_alias: bool = False) -> Response:
    """An answer as JSON; made on a thread if it is large."""
    if is_large():
        body = await asyncio.to_thread(answer.model_dump_json, by_alias=by_alias)
    else:
        body = answer.model_dump_json(by_alias=by_alias)
    return Response(body, media_type="application/json")
