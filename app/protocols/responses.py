"""POST /v1/responses: vLLM's class for OpenAI's Responses, and what of it a server without a store cannot do.

Nothing is stored, neither for a tenant nor for all: OpenAI's clients ask for it by default (`store`), so that is let
pass and answered with `"store": false`. What needs a stored response is refused (`app.gate.not_done`). vLLM's events go
out as server-sent events, and errors before the first as a status.

Leans on vLLM: `OpenAIServingResponses` calls `_preflight` before `_render_resolved_response_inputs`, and
`EngineClient.generate` only within the generator that it returns; `store` becomes false where `enable_store` is. A
stream's first two events are `response.created` and `response.in_progress`, which wait for nothing; a stream raises
what goes wrong; the last event carries the whole answer, with its usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any, Literal, cast

from fastapi import Request
from openai.types.responses import ResponseIncompleteEvent
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    StreamingResponsesResponse,
)
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT, with_sse_keep_alive
from vllm.exceptions import VLLMValidationError

from app.dialects.calls import reading_cut_calls, rendered_with_grammar
from app.dialects.errors import in_openais_words
from app.dialects.event_stream import event_stream
from app.gate.kv_cache_field import FIELD, read_field
from app.gate.request_context import RequestContext, current_request
from app.openai.chat_renderer import require_room
from app.openai.engine_client import HandleEngineClient
from app.openai.large_answers import after, json_response, made

_AT_ONCE = 2
"""Events that come before anything is computed."""


class ResponsesServing(OpenAIServingResponses):
    """vLLM's Responses, with `usage.kv_cache`; stateless."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = reading_cut_calls(self.parser)
        self.enable_store = False  # whatever vLLM's environment variable says: its store has neither bounds nor owners

    async def create_responses(
        self, request: ResponsesRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[StreamingResponsesResponse, None] | ResponsesResponse | ErrorResponse:
        """See vLLM's."""
        context = current_request()
        context.parsed = True
        context.stages.lap("parse")
        context.max_tokens = request.max_output_tokens
        context.streams = bool(request.stream)
        context.kv_cache = read_field((request.model_extra or {}).get(FIELD))
        _refuse_what_cannot_be_answered(request)
        answer = await super().create_responses(request, raw_request)
        if isinstance(answer, ResponsesResponse):
            complete(answer)
        return answer

    async def count_input(self, request: ResponsesRequest) -> int | ErrorResponse:
        """The tokens of a request's prompt."""
        wrong = await self._check_model(request)
        if wrong is not None:
            return wrong
        rendered = await self.online_renderer.render_responses(request)
        if isinstance(rendered, ErrorResponse):
            return rendered
        prompt: Any = rendered.engine_input
        return len(prompt["prompt_token_ids"])

    async def _render_resolved_response_inputs(
        self, request: ResponsesRequest, prev_response: ResponsesResponse | None, *, skip_mm_cache: bool = False
    ) -> Any:
        render = super()._render_resolved_response_inputs

        async def rendered() -> Any:
            found = await render(request, prev_response, skip_mm_cache=skip_mm_cache)
            current_request().stages.lap("render")
            if not isinstance(found, ErrorResponse):
                require_room([found.engine_input], self.model_config.max_model_len, "input")
            return found

        engine = cast(HandleEngineClient, self.engine_client)
        return await rendered_with_grammar(request, "text", rendered, engine.check_constraint)

    async def responses_full_generator(
        self, request: ResponsesRequest, sampling_params: Any, result_generator: Any, *args: Any, **more: Any
    ) -> ErrorResponse | ResponsesResponse:
        """See vLLM's."""
        ended = await after(result_generator)
        return await made(super().responses_full_generator(request, sampling_params, ended, *args, **more))


class InputTokens(BaseModel):
    """What OpenAI says of a prompt's length."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def complete(answer: ResponsesResponse) -> None:
    """Add what OpenAI's clients look for and vLLM leaves out; and our fields to an ended answer's usage."""
    answer.service_tier = "default"
    for name, value in (("store", False), ("error", None)):
        setattr(answer, name, value)  # extra fields, unknown to the type
    told = current_request().kv_usage.fields()
    if told is None or answer.usage is None:
        return
    answer.usage.input_tokens_details.cached_tokens = current_request().kv_usage.cached_tokens
    setattr(answer.usage, FIELD, told)  # an extra field, unknown to the type


def _refuse_what_cannot_be_answered(request: ResponsesRequest) -> None:
    """Raise VLLMValidationError (400) for what the client would believe to have been obeyed."""
    if not request.input:
        raise VLLMValidationError("`input` must hold a text or at least one item.", parameter="input")


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
