"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages, which vLLM answers as a chat.

Leans on vLLM: `AnthropicServingMessages` is an `OpenAIServingChat` that converts a request, calls its own
`create_chat_completion`, and converts the answer or the events of a stream; it knows neither errors nor comments among
those, and its usage has no further fields. Its requests drop fields that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import partial_json_parser  # type: ignore[import-untyped]
from fastapi import Request
from partial_json_parser import MalformedJSON
from partial_json_parser.core.options import Allow  # type: ignore[import-untyped]
from pydantic import Field
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
    AnthropicUsage,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMValidationError

from app.dialects.event_stream import event_stream
from app.gate.kv_cache_field import FIELD
from app.gate.request_context import current_request
from app.openai.api import ERROR_EVENT, ChatServing
from app.protocols.error_words import error_event

_START, _USAGE_EVENT = ("event: message_start\ndata: ", "event: message_delta\ndata: ")
_OF_CHATS = "chatcmpl-"


class MessagesUsage(AnthropicUsage):
    """Anthropic's usage, with ours."""

    kv_cache: dict[str, Any] | None = None


class MessagesResponse(AnthropicMessagesResponse):
    """Anthropic's answer, with our usage."""

    usage: MessagesUsage | None = None


class MessagesRequest(AnthropicMessagesRequest):
    """Anthropic's request, within Anthropic's bounds; how much `stop_sequences` may hold: `app.gate.request_bounds`."""

    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)


class MessagesServing(ChatServing, AnthropicServingMessages):
    """A chat in Anthropic's words; what chats have, such as bounds on time and sampled answers put back, it has."""

    error_event = staticmethod(str)  # `message_stream_converter` reads vLLM's

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """See vLLM's. Anthropic's request has lost our field on the way here."""
        body = await raw_request.json() if raw_request is not None else {}
        setattr(request, FIELD, body.get(FIELD))
        current_request().name_answer = message_id
        return await super().create_chat_completion(request, raw_request)

    @classmethod
    def to_chat_completion_request(cls, anthropic_request: Any, **how: Any) -> ChatCompletionRequest:
        """See vLLM's. An assistant's message at the end is begun, and the answer goes on behind it."""
        request = super().to_chat_completion_request(anthropic_request, **how)
        last: Any = request.messages[-1] if request.messages else {}
        if last.get("role") == "assistant":
            if last.get("tool_calls"):
                raise VLLMValidationError(
                    "`messages` ends with a `tool_use`: send its `tool_result` behind it.", parameter="messages"
                )
            if last.get("content"):
                request.add_generation_prompt, request.continue_final_message = False, True
        return request

    @classmethod
    def _build_base_request(cls, anthropic_request: Any, openai_messages: list[Any]) -> ChatCompletionRequest:
        stops = getattr(anthropic_request, "stop_sequences", None)
        if stops:  # OpenAI's chats have four at most
            anthropic_request = anthropic_request.model_copy(update={"stop_sequences": None})
        request = super()._build_base_request(anthropic_request, openai_messages)
        if stops:
            request.stop = stops
        return request

    def messages_full_converter(self, generator: ChatCompletionResponse) -> MessagesResponse:
        """See vLLM's, which reads a call's arguments: those of one that was cut are ended for it."""
        choice = generator.choices[0]
        for call in choice.message.tool_calls or ():
            call.function.arguments = _whole(call.function.arguments)
        answer = super().messages_full_converter(generator).model_dump()
        if choice.finish_reason == "length":
            answer["stop_reason"] = "max_tokens"
        if answer["usage"] is not None:
            answer["usage"][FIELD] = current_request().kv_usage.fields()
        answer["id"] = message_id(answer["id"])
        return MessagesResponse.model_validate(answer)

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """See vLLM's."""
        failed: ErrorResponse | None = None

        async def chunks() -> AsyncGenerator[str, None]:
            nonlocal failed
            async for event in generator:
                if event.startswith(ERROR_EVENT):
                    failed = ErrorResponse.model_validate_json(event.removeprefix("data: "))
                    return
                if event.startswith("data: "):  # else a comment, which the route writes itself
                    yield event

        async for event in super().message_stream_converter(chunks()):
            yield _with_usage(event)
        if failed is not None:
            yield error_event(failed.error.code, failed.error.message)


def _whole(arguments: str) -> str:
    """A JSON object: the arguments, or as much of them as was said."""
    try:
        said = partial_json_parser.loads(arguments, Allow.ALL)
    except (ValueError, MalformedJSON, RecursionError):
        said = {}
    return json.dumps(said if isinstance(said, dict) else {})


def message_id(of_chat: str) -> str:
    """The id of an answer, of what vLLM calls it."""
    return f"msg_{of_chat.removeprefix(_OF_CHATS)}"


def _with_usage(event: str) -> str:
    if event.startswith(_START):
        return _with_start(event)
    told = current_request().kv_usage.fields()
    if told is None or not event.startswith(_USAGE_EVENT):
        return event
    delta = json.loads(event.removeprefix(_USAGE_EVENT))
    if delta.get("usage"):
        delta["usage"][FIELD] = told
    return f"{_USAGE_EVENT}{json.dumps(delta, ensure_ascii=False)}\n\n"


def _with_start(event: str) -> str:
    """The first event with Anthropic's id, and with the usage that the last one will tell."""
    start = json.loads(event.removeprefix(_START))
    message = start["message"]
    message["id"] = message_id(message["id"])
    cached, usage = current_request().kv_usage.cached_at_first, message.get("usage")
    if usage and cached is not None and "cache_read_input_tokens" not in usage:
        read = min(cached, usage["input_tokens"])
        usage["input_tokens"] -= read
        usage.update({"cache_creation_input_tokens": 0, "cache_read_input_tokens": read})
    return f"{_START}{json.dumps(start, ensure_ascii=False)}\n\n"


@with_cancellation
async def create_message(request: MessagesRequest, raw_request: Request) -> Response:
    """The model's answer to a conversation, as Anthropic's Messages API gives it."""
    serving: MessagesServing = raw_request.app.state.anthropic_serving_messages
    answer = await serving.create_messages(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, AnthropicMessagesResponse):
        return JSONResponse({**answer.model_dump(exclude_none=True), "stop_sequence": answer.stop_sequence})
    return event_stream(with_sse_keep_alive(answer, raw_request.app.state.args.sse_keep_alive_interval))


@with_cancellation
async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Response:
    """How many tokens a conversation's prompt would have."""
    serving: MessagesServing = raw_request.app.state.anthropic_serving_messages
    count = await serving.count_tokens(request, raw_request)
    if isinstance(count, ErrorResponse):
        return JSONResponse(count.model_dump(), status_code=count.error.code)
    return JSONResponse(count.model_dump(exclude_none=True))
