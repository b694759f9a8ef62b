"""Builds vLLM's classes for the further protocols into `app.state`, and adds their routes.

Where clients of OpenAI or Anthropic ask for what is not served here, 404 says so, and what is.

Leans on vLLM: `OpenAIServingResponses` and `AnthropicServingMessages`, with the arguments that
`vllm.entrypoints.launchers.api_server.app_state.init_app_state` gives them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.renderers.online_renderer import OnlineRenderer

from app.gate.auth import route_path
from app.gate.errors import answer_router_error, error_response
from app.gate.json_route import Endpoint, add_routes, post_routes
from app.gate.not_done import KEEPS_NOTHING, refuse
from app.gate.not_done import MESSAGES as NOT_OF_MESSAGES
from app.gate.not_done import RESPONSES as NOT_OF_RESPONSES
from app.openai.engine_client import HandleEngineClient
from app.protocols.error_words import MESSAGES
from app.protocols.messages import MessagesResponse, MessagesServing, count_tokens, create_message
from app.protocols.models import models_router
from app.protocols.responses import InputTokens, ResponsesServing, count_input_tokens, create_response
from configs.settings import Settings

RESPONSES, COUNT_TOKENS, COUNT_INPUT = "/v1/responses", f"{MESSAGES}/count_tokens", "/v1/responses/input_tokens"
PATHS = frozenset({RESPONSES, COUNT_INPUT, MESSAGES, COUNT_TOKENS})
_OF_MESSAGES = (refuse(NOT_OF_MESSAGES),)
_ROUTES = {
    RESPONSES: Endpoint(create_response, ResponsesResponse, streams=True, checks=(refuse(NOT_OF_RESPONSES),)),
    COUNT_INPUT: Endpoint(count_input_tokens, InputTokens, checks=(refuse(NOT_OF_RESPONSES),)),
    MESSAGES: Endpoint(create_message, MessagesResponse, streams=True, checks=_OF_MESSAGES),
    COUNT_TOKENS: Endpoint(count_tokens, AnthropicCountTokensResponse, checks=_OF_MESSAGES),
}


def add_protocol_routes(app: FastAPI, engine: HandleEngineClient, renderer: OnlineRenderer, settings: Settings) -> None:
    """Add these routes to those of `app.openai.api.add_openai_routes`, with the renderer that it gave."""
    parsed = settings.engine
    shared: dict[str, Any] = {
        "online_renderer": renderer,
        "request_logger": None,
        "chat_template": renderer.chat_template,
        "chat_template_content_format": renderer.chat_template_content_format,
        "enable_auto_tools": parsed.auto_tool_choice,
        "tool_parser": parsed.tool_call_parser,
        "reasoning_parser": parsed.reasoning_parser or "",
        "enable_prompt_tokens_details": True,
    }
    models = app.state.openai_serving_models
    app.state.openai_serving_responses = ResponsesServing(engine, models, **shared)
    app.state.anthropic_serving_messages = MessagesServing(engine, models, "assistant", **shared)
    app.state.anthropic_serving_messages.keep_alive_s = app.state.args.sse_keep_alive_interval
    add_routes(app, post_routes(_ROUTES))
    add_routes(app, models_router(engine))


_API = "/v1/"
_WITHOUT = {
    "responses": KEEPS_NOTHING,
    "conversations": KEEPS_NOTHING,
    "embeddings": "Its model generates text and has no embeddings.",
    "score": "Its model generates text and ranks nothing.",
    "rerank": "Its model generates text and ranks nothing.",
    "moderations": "Its model generates text and classifies nothing.",
    "images": "Its model takes and generates text only.",
    "audio": "Its model takes and generates text only.",
    "realtime": "Its model takes and generates text only.",
    "files": "It keeps no files.",
    "batches": "It takes no batches: send the requests themselves.",
    "messages": "It takes no batches: send the requests themselves.",
}
"""By what follows /v1/: why."""


async def answer_unserved(request: Request, error: Exception) -> Response:
    """As `app.gate.errors.answer_router_error`, with more words for paths of well-known APIs."""
    path = route_path(request.scope)
    if not (isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND and path.startswith(_API)):
        return await answer_router_error(request, error)
    why = _WITHOUT.get(path.removeprefix(_API).partition("/")[0])
    sentences = (f"This server does not serve {path}.", why, f"It serves {', '.join(_served(request.app))}.")
    return error_response(HTTPStatus.NOT_FOUND, " ".join(filter(None, sentences)))


def _served(app: FastAPI) -> list[str]:
    return sorted(route.path for route in app.routes if isinstance(route, APIRoute) and route.path.startswith(_API))
