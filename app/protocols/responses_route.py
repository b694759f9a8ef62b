"""The route of POST /v1/responses: vLLM's events as server-sent events, and errors before the first as a status.

Leans on vLLM: a stream's first two events are `response.created` and `response.in_progress`, which wait for nothing;
a stream raises what goes wrong; the last event carries the whole answer, with its usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from openai.types.responses import ResponseIncompleteEvent
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT, with_sse_keep_alive

from app.dialects.errors import in_openais_words
from app.dialects.event_stream import event_stream
from app.gate.request_context import RequestContext, current_request
from app.openai.large_answers import json_response
from app.protocols.responses import InputTokens, ResponsesServing, complete

_AT_ONCE = 2
"""Events that come before anything is computed."""


class _IncompleteEvent(ResponseIncompleteEvent):
    """OpenAI's, with vLLM's answer."""

    response: ResponsesResponse  # type: ignore[assignment]


@with_cancellation
async def create_response(request: ResponsesRequest, raw_request: Request) -> Response:
    """The model's answer to a conversation, as OpenAI's Responses API gives it. Nothing is stored."""
    serving: ResponsesServing = raw_request.app.state.openai_serving_responses
    keep_alive_s: float = raw_request.app.state.args.sse_keep_alive_interval
    answer = await serving.create_responses(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, ResponsesResponse):
        return await json_response(answer, by_alias=True)
    events = await _open_stream(answer, current_request(), keep_alive_s)
    return event_stream(with_sse_keep_alive(events, keep_alive_s))


@with_cancellation
async def count_input_tokens(request: ResponsesRequest, raw_request: Request) -> Response:
    """How many tokens a conversation's prompt would have."""
    serving: ResponsesServing = raw_request.app.state.openai_serving_responses
    count = await serving.count_input(request)
    if isinstance(count, ErrorResponse):
        return JSONResponse(count.model_dump(), status_code=count.error.code)
    return JSONResponse(InputTokens(input_tokens=count).model_dump())


async def _open_stream(
    events: AsyncGenerator[Any, None], context: RequestContext, keep_alive_s: float
) -> AsyncGenerator[str, None]:
    """Wait a while for what comes with the first token, before the response starts; see `app.openai.api`.

    Raises what goes wrong by then, so that it becomes a status.
    """
    begun = [_written(await anext(events)) for _ in range(_AT_ONCE)]
    pending = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({pending}, timeout=keep_alive_s)
        if pending.done():
            pending.result()
    except BaseException:
        pending.cancel()
        raise

    async def stream() -> AsyncGenerator[str, None]:
        sent = _AT_ONCE
        try:
            for event in begun:
                yield event
            if not pending.done():
                yield SSE_KEEP_ALIVE_COMMENT
            yield _written(await pending)
            sent += 1
            context.first_event_sent()
            async for event in events:
                yield _written(event)
                sent += 1
        except Exception as error:
            yield _failure(error, sent)
        finally:
            pending.cancel()
            with contextlib.suppress(RuntimeError):  # the cancelled step may not have ended yet
                await events.aclose()

    return stream()


def _written(event: Any) -> str:
    if isinstance(event, ResponseCreatedEvent | ResponseInProgressEvent | ResponseCompletedEvent):
        complete(event.response)
    if isinstance(event, ResponseCompletedEvent) and event.response.status == "incomplete":
        event = _IncompleteEvent.model_construct(**{**dict(event), "type": "response.incomplete"})
    return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


def _failure(error: Exception, number: int) -> str:
    """OpenAI's event `error`, which holds what chat's does too: that is what makes the official client raise it."""
    info = create_error_response(error).error
    told = in_openais_words(info.code, info.model_dump()).model_dump()
    event = {"type": "error", **{name: told[name] for name in ("code", "message", "param")}}
    event |= {"sequence_number": number, "error": told}
    return f"event: error\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
