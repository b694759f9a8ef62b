"""The OpenAI surface: vLLM's serving classes over our engine client, behind vLLM's own routes.

Leans on vLLM, and `tests/app/openai/test_vllm_contract.py` fails when one of these changes:

* `OpenAIServingChat`, `OpenAIServingCompletion`, `OpenAIServingModels`, `ServingTokenization`, `OnlineRenderer`, with
  the arguments that `vllm.entrypoints.launchers.api_server.app_state.init_app_state` gives them;
* the route functions for tokens, which find their class in `app.state` under the names written here;
* `init_exception_handler`, whose handlers read `app.state.args.log_error_stack`;
* `ServingTokenization.create_tokenize`, which asks the request itself for its `TokenizeParams`, in which vLLM sets no
  limit, and takes subclasses of its two requests;
* `with_sse_keep_alive`, which puts a comment into a stream's silence;
* `request_output_to_completion_response`, whose result `create_completion` returns as it is;
* the first event of a stream, which is either an answer's or, when nothing was generated, the error's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.api_router import detokenize, tokenize
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT, with_sse_keep_alive
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers import TokenizeParams
from vllm.renderers.chat_utils import ConversationMessage

from app.dialects.asked import gap_marks
from app.dialects.calls import reading_cut_calls, rendered_with_grammar
from app.dialects.error_messages import answer_wrong_body, cut_error_messages
from app.dialects.errors import event_in_openais_words
from app.dialects.event_stream import event_stream, with_null_usage
from app.dialects.reading import Readings
from app.gate.json_route import Endpoint, add_routes, post_routes
from app.gate.kv_cache_field import FIELD, read_field
from app.gate.not_done import CHATS, COMPLETIONS, TOKENIZE, refuse
from app.gate.request_bounds import RequestBounds
from app.gate.request_context import RequestContext, current_request
from app.openai.chat_renderer import ChatRenderer, require_room
from app.openai.engine_client import HandleEngineClient
from app.openai.large_answers import after, is_large, json_response, made
from configs.settings import Settings

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"})

KEEP_ALIVE_S = 10.0
"""Silence of a stream after which its headers go out, and then a comment each time: proxies end a connection that is
silent for some 30 s or more. What fails before has an HTTP status, what fails later is an error event."""
TURN_S = 0.01
"""How long events of one stream may be written before others get their turn."""
ERROR_EVENT = 'data: {"error"'
"""How an error begins among a stream's events."""


ResponseT = TypeVar("ResponseT", ChatCompletionResponse, CompletionResponse)


class ChatServing(OpenAIServingChat):
    """vLLM's chat completions, with `usage.kv_cache`, and with errors before the first token as a status."""

    keep_alive_s: float
    error_event: Callable[[str], str] = staticmethod(event_in_openais_words)
    """How an error is told among a stream's events, of vLLM's event of it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.parser_cls = reading_cut_calls(self.parser_cls)

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """See vLLM's."""
        _note_what_it_asks_for(request)
        if not request.messages:
            return self.create_error_response("`messages` must hold at least one message.", param="messages")
        _refuse_beam_search(request)
        answer = await super().create_chat_completion(request, raw_request)
        return await _finish(answer, self.keep_alive_s, self.error_event)

    async def render_chat_request(
        self, request: ChatCompletionRequest
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """See vLLM's."""
        render = super().render_chat_request

        async def rendered() -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
            found = await render(request)
            current_request().stages.lap("render")
            if not isinstance(found, ErrorResponse):
                require_room(found[1], self.model_config.max_model_len, "messages")
            return found

        engine = cast(HandleEngineClient, self.engine_client)
        return await rendered_with_grammar(request, "response_format", rendered, engine.check_constraint)

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: AsyncIterator[RequestOutput], *args: Any, **more: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        """See vLLM's."""
        ended = await after(result_generator)
        answer = await made(super().chat_completion_full_generator(request, ended, *args, **more))
        if isinstance(answer, ChatCompletionResponse):
            for choice in answer.choices:
                if choice.index in current_request().cut:
                    choice.finish_reason = "length"  # also of a call, as in a stream
        return answer


class _Unmade(NamedTuple):
    """A completion whose outputs have ended."""

    make: Callable[[], CompletionResponse]


class CompletionServing(OpenAIServingCompletion):
    """vLLM's completions, with `usage.kv_cache`, and with errors before the first token as a status."""

    keep_alive_s: float

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse:
        """See vLLM's."""
        _note_what_it_asks_for(request)
        _refuse_beam_search(request)
        answer = await super().create_completion(request, raw_request)
        if isinstance(answer, _Unmade):
            answer = await asyncio.to_thread(answer.make) if is_large() else answer.make()
        return await _finish(answer, self.keep_alive_s, event_in_openais_words)

    def request_output_to_completion_response(self, *args: Any) -> Any:
        """See vLLM's, which returns what this returns."""
        return _Unmade(functools.partial(super().request_output_to_completion_response, *args))

    async def _get_trace_headers(self, headers: Mapping[str, str]) -> Mapping[str, str] | None:
        """See vLLM's, which asks for it before each of a request's prompts: others get their turn in between."""
        await asyncio.sleep(0)
        return await super()._get_trace_headers(headers)

    async def render_completion_request(self, request: CompletionRequest) -> list[EngineInput] | ErrorResponse:
        """See vLLM's."""
        rendered = await super().render_completion_request(request)
        current_request().stages.lap("render")
        if not isinstance(rendered, ErrorResponse):
            require_room(rendered, self.model_config.max_model_len, "prompt")
            await cast(HandleEngineClient, self.engine_client).check_constraint(request.extract_structured_outputs())
        return rendered


def _note_what_it_asks_for(request: ChatCompletionRequest | CompletionRequest) -> None:
    """vLLM has made a request of the body; take out of it what is ours."""
    context = current_request()
    context.parsed = True
    context.stages.lap("parse")
    given = vars(request)  # vLLM's own access to a chat's `max_tokens` warns that it is deprecated
    context.max_tokens = given.get("max_completion_tokens") or given["max_tokens"]
    context.streams = bool(request.stream)
    context.tokens_at_once = (request.stream_interval or 1) if request.stream else None
    context.kv_cache = read_field((request.model_extra or {}).get(FIELD))
    context.tells_usage = bool(request.stream_options and request.stream_options.include_usage)


def _refuse_beam_search(request: ChatCompletionRequest | CompletionRequest) -> None:
    if request.use_beam_search:  # vLLM would send one request per beam and token down the handle
        raise VLLMValidationError("This server does not do beam search.", parameter="use_beam_search")


async def _finish(
    answer: AsyncGenerator[str, None] | ResponseT | ErrorResponse,
    keep_alive_s: float,
    error_event: Callable[[str], str],
) -> AsyncGenerator[str, None] | ResponseT | ErrorResponse:
    context = current_request()
    if isinstance(answer, ErrorResponse):
        return answer
    if isinstance(answer, AsyncGenerator):
        return await _open_stream(answer, context, keep_alive_s, error_event)
    context.kv_usage.write_to(answer.usage)
    return answer


async def _open_stream(
    events: AsyncGenerator[str, None],
    context: RequestContext,
    keep_alive_s: float,
    error_event: Callable[[str], str],
) -> AsyncGenerator[str, None] | ErrorResponse:
    """Wait a while for the stream's first event, which comes with the first token, before the response starts.

    Until then nothing has been sent, so what goes wrong can still be a status: no replica, a refusal by the engine.
    After `keep_alive_s` the response starts with a comment, or proxies would end it; errors are events then.
    """
    pending = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({pending}, timeout=keep_alive_s)
        if pending.done() and (first := pending.result()).startswith(ERROR_EVENT):
            await events.aclose()
            return ErrorResponse.model_validate(json.loads(first.removeprefix("data: ")))
    except BaseException:
        pending.cancel()
        raise

    def written(event: str) -> str:
        if event.startswith(ERROR_EVENT):
            return error_event(event)
        told = context.kv_usage.write_to_event(event)
        return with_null_usage(told) if context.tells_usage else told

    async def stream() -> AsyncGenerator[str, None]:
        try:
            if not pending.done():
                yield SSE_KEEP_ALIVE_COMMENT
            yield written(await pending)
            context.first_event_sent()
            turn = time.monotonic()
            async for event in events:
                yield written(event)
                if time.monotonic() - turn > TURN_S:  # else many answers' events of one step are one turn of the loop
                    await asyncio.sleep(0)
                    turn = time.monotonic()
        finally:
            pending.cancel()

    return stream()


def add_openai_routes(app: FastAPI, engine: HandleEngineClient, renderer: ChatRenderer, settings: Settings) -> None:
    """Build vLLM's serving classes into `app.state`, and add their routes and exception handlers."""
    http, engine_settings = settings.http, settings.engine
    chat_template, form = renderer.chat_template, renderer.chat_template_content_format
    models = OpenAIServingModels(
        engine, [BaseModelPath(name=settings.model_name, model_path=settings.model_name)], lora_modules=None
    )
    models.lora_requests = {
        name: LoRARequest(name, number, adapter.digest)
        for number, (name, adapter) in enumerate(engine.keys.adapters.items(), start=1)
    }
    most_tokens = engine.model_config.max_model_len
    app.state.request_bounds = RequestBounds(most_tokens, engine.renderer.get_tokenizer().max_chars_per_token)
    gaps = gap_marks(engine.renderer.get_tokenizer().get_vocab())
    readings = Readings(
        settings.model_name, http.model_aliases, engine.keys.adapters, most_tokens, http.drop_media, gaps
    )
    app.state.is_served, app.state.readings = readings.is_served, readings.by_path()
    app.state.args = Namespace(log_error_stack=False, sse_keep_alive_interval=KEEP_ALIVE_S)
    app.state.engine_client = engine
    app.state.openai_serving_models = models
    app.state.openai_serving_chat = ChatServing(
        engine,
        models,
        "assistant",
        online_renderer=renderer,
        request_logger=None,
        chat_template=chat_template,
        chat_template_content_format=form,
        enable_auto_tools=engine_settings.auto_tool_choice,
        tool_parser=engine_settings.tool_call_parser,
        reasoning_parser=engine_settings.reasoning_parser or "",
        enable_prompt_tokens_details=True,
    )
    app.state.openai_serving_completion = CompletionServing(
        engine, models, online_renderer=renderer, request_logger=None, enable_prompt_tokens_details=True
    )
    app.state.openai_serving_chat.keep_alive_s = app.state.openai_serving_completion.keep_alive_s = KEEP_ALIVE_S
    app.state.serving_tokenization = ServingTokenization(
        models, renderer, chat_template=chat_template, chat_template_content_format=form
    )
    init_exception_handler(app)
    for wrong in (RequestValidationError, ValidationError):
        app.add_exception_handler(wrong, answer_wrong_body)
    cut_error_messages()
    add_routes(app, post_routes(_ROUTES))


@with_cancellation
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """The model's answer to a chat, as OpenAI's API gives it."""
    serving: ChatServing = raw_request.app.state.openai_serving_chat
    return await _response(await serving.create_chat_completion(request, raw_request), serving.keep_alive_s)


@with_cancellation
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """The model's continuation of a text, or of several, as OpenAI's API gives it."""
    serving: CompletionServing = raw_request.app.state.openai_serving_completion
    return await _response(await serving.create_completion(request, raw_request), serving.keep_alive_s)


async def _response(
    answer: AsyncGenerator[str, None] | ChatCompletionResponse | CompletionResponse | ErrorResponse, keep_alive_s: float
) -> Response:
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, AsyncGenerator):
        return event_stream(with_sse_keep_alive(answer, keep_alive_s))
    return await json_response(answer)


class BoundedTokenizeCompletionRequest(TokenizeCompletionRequest):
    """vLLM's, with a limit."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """See vLLM's."""
        return _limited(super().build_tok_params(model_config), model_config)


class BoundedTokenizeChatRequest(TokenizeChatRequest):
    """vLLM's, with a limit."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """See vLLM's."""
        return _limited(super().build_tok_params(model_config), model_config)


def _limited(params: TokenizeParams, model_config: ModelConfig) -> TokenizeParams:
    return dataclasses.replace(
        params, max_total_tokens=model_config.max_model_len, max_total_tokens_param="max_model_len"
    )


async def tokenize_within_context(
    request: BoundedTokenizeCompletionRequest | BoundedTokenizeChatRequest, raw_request: Request
) -> Response:
    """The token ids that a text or a chat is made into. Texts beyond the model's context are refused."""
    return await tokenize(request, raw_request)


async def detokenize_known(request: DetokenizeRequest, raw_request: Request) -> Response:
    """The text that token ids stand for. Ids that the model does not have are refused."""
    raw_request.app.state.engine_client.renderer.validate_token_ids(request.tokens, parameter="tokens")
    return await detokenize(request, raw_request)


_ROUTES = {
    "/v1/chat/completions": Endpoint(
        create_chat_completion, ChatCompletionResponse, streams=True, checks=(refuse(CHATS),)
    ),
    "/v1/completions": Endpoint(create_completion, CompletionResponse, streams=True, checks=(refuse(COMPLETIONS),)),
    "/tokenize": Endpoint(tokenize_within_context, TokenizeResponse, checks=(refuse(TOKENIZE),)),
    "/detokenize": Endpoint(detokenize_known, DetokenizeResponse),
}
