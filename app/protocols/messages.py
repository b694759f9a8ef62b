"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages, which vLLM answers as a chat.

Leans on vLLM: `AnthropicServingMessages` is an `OpenAIServingChat` that converts a request, calls its own
`create_chat_completion`, and converts the answer or the events of a stream; it knows neither errors nor comments among
those, and its usage has no further fields. Its requests drop fields that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
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

from app.gate.kv_cache_field import FIELD
from app.gate.request_context import current_request
from app.openai.api import ERROR_EVENT, ChatServing
from app.protocols.anthropic_errors import error_event

_USAGE_EVENT = "event: message_delta\ndata: "


class MessagesUsage(AnthropicUsage):
    """Anthropic's usage, with ours."""

    kv_cache: dict[str, Any] | None = None


class MessagesResponse(AnthropicMessagesResponse):
    """Anthropic's answer, with our usage."""

    usage: MessagesUsage | None = None


class MessagesServing(ChatServing, AnthropicServingMessages):
    """A chat in Anthropic's words; what chats have, such as bounds on time and sampled answers put back, it has."""

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """See vLLM's. Anthropic's request has lost our field on the way here."""
        body = await raw_request.json() if raw_request is not None else {}
        setattr(request, FIELD, body.get(FIELD))
        return await super().create_chat_completion(request, raw_request)

    def messages_full_converter(self, generator: ChatCompletionResponse) -> MessagesResponse:
        """See vLLM's."""
        answer = super().messages_full_converter(generator).model_dump()
        if answer["usage"] is not None:
            answer["usage"][FIELD] = current_request().kv_usage.fields()
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


async def refuse_tools_of_servers(raw_request: Request) -> None:
    """Raise VLLMValidationError (400), before vLLM reads a body, for tools that would have to run here."""
    body = await raw_request.json()
    if not isinstance(body, dict):
        return
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        kind, callers = _field(tool, "type"), _field(tool, "allowed_callers")
        if kind not in (None, "custom") or callers not in (None, [], ["direct"]):
            named = kind if kind not in (None, "custom") else callers
            raise VLLMValidationError(
                f"This server runs no tools, such as {str(named)[:64]!r}: give tools with an `input_schema`, whose "
                "calls the client answers.",
                parameter="tools",
            )


def _field(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, dict) else None


def _with_usage(event: str) -> str:
    told = current_request().kv_usage.fields()
    if told is None or not event.startswith(_USAGE_EVENT):
        return event
    delta = json.loads(event.removeprefix(_USAGE_EVENT))
    if delta.get("usage"):
        delta["usage"][FIELD] = told
    return f"{_USAGE_EVENT}{json.dumps(delta, ensure_ascii=False)}\n\n"


@with_cancellation
async def create_message(request: AnthropicMessagesRequest, raw_request: Request) -> Response:
    """The model's answer to a conversation, as Anthropic's Messages API gives it."""
    serving: MessagesServing = raw_request.app.state.anthropic_serving_messages
    answer = await serving.create_messages(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, AnthropicMessagesResponse):
        return JSONResponse(answer.model_dump(exclude_none=True))
    events = with_sse_keep_alive(answer, raw_request.app.state.args.sse_keep_alive_interval)
    return StreamingResponse(events, media_type="text/event-stream")


@with_cancellation
async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Response:
    """How many tokens a conversation's prompt would have."""
    serving: MessagesServing = raw_request.app.state.anthropic_serving_messages
    count = await serving.count_tokens(request, raw_request)
    if isinstance(count, ErrorResponse):
        return JSONResponse(count.model_dump(), status_code=count.error.code)
    return JSONResponse(count.model_dump(exclude_none=True))
