"""POST /v1/responses: vLLM's class for OpenAI's Responses, and what of it a server without a store cannot do.

Nothing is stored, neither for a tenant nor for all: OpenAI's clients ask for it by default (`store`), so that is let
pass and answered with `"store": false`. What needs a stored response is refused (`app.gate.not_done`).

Leans on vLLM: `OpenAIServingResponses` calls `_preflight` before `_render_resolved_response_inputs`, and
`EngineClient.generate` only within the generator that it returns; `store` becomes false where `enable_store` is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal, cast

from fastapi import Request
from pydantic import BaseModel
from vllm.entrypoints.openai.responses.protocol import (
    ResponsesRequest,
    ResponsesResponse,
    StreamingResponsesResponse,
)
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError

from app.dialects.calls import reading_cut_calls, rendered_with_grammar
from app.gate.kv_cache_field import FIELD, read_field
from app.gate.request_context import current_request
from app.openai.chat_renderer import require_room
from app.openai.engine_client import HandleEngineClient
from app.openai.large_answers import after, made


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
