"""GET /v1/models and /v1/models/{id}: the model that is served, in OpenAI's words or in Anthropic's.

Anthropic's client is known by its header `anthropic-version`, which the official one always sends.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelCard, ModelList

from app.gate.errors import error_response
from app.openai.engine_client import HandleEngineClient

_SINCE = int(time.time())
"""When this process began to serve, in seconds: `created` of its models. vLLM says another time at each question."""
_MOST_NAMED = 16
"""Models in a sentence."""
_NO_REPLICA: dict[str, Any] = {"model": ErrorResponse, "description": "No replica can answer now."}


def models_router(engine: HandleEngineClient) -> APIRouter:
    """Both routes; clients take a list of models for a server that answers."""
    routes = APIRouter(dependencies=[Depends(engine.check_health)], responses={503: _NO_REPLICA})
    routes.add_api_route("/v1/models", show_models, response_model=None, responses={200: {"model": ModelList}})
    routes.add_api_route(
        "/v1/models/{model_id:path}",
        show_model,
        response_model=None,
        responses={
            200: {"model": ModelCard, "description": "It is served."},
            404: {"model": ErrorResponse, "description": "This server serves no model of that id."},
        },
    )
    return routes


async def show_models(raw_request: Request) -> Response:
    """The model and its adapters; by what other names the model may be called is not listed (http.model_aliases)."""
    cards = await _cards(_models(raw_request))
    if not _is_anthropics(raw_request):
        return JSONResponse(ModelList(data=cards).model_dump())
    data = [_in_anthropics_words(card) for card in cards]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return JSONResponse({"data": data, "has_more": False, **ends})


async def show_model(
    model_id: Annotated[str, Path(description="As `GET /v1/models` lists it, or one of http.model_aliases.")],
    raw_request: Request,
) -> Response:
    """One model by its id, which may hold slashes: the one that is served, or 404."""
    models = _models(raw_request)
    listed = {card.id: card for card in await _cards(models)}
    wanted = models.model_name() if raw_request.app.state.is_served(model_id[:1024]) else model_id
    if card := listed.get(wanted):
        return JSONResponse(_in_anthropics_words(card) if _is_anthropics(raw_request) else card.model_dump())
    served = [f"`{name}`" for name in islice(listed, _MOST_NAMED)] + ["…"] * (len(listed) > _MOST_NAMED)
    message = f"The model `{model_id[:128]}` does not exist. This server serves {', '.join(served)}."
    return error_response(HTTPStatus.NOT_FOUND, message, param="model")


async def _cards(models: OpenAIServingModels) -> list[ModelCard]:
    """The model's card and its adapters', which have the model's context."""
    cards = (await models.show_available_models()).data
    for card in cards:
        card.created = _SINCE
        card.max_model_len = card.max_model_len or models.model_config.max_model_len
    return list(cards)


def _models(raw_request: Request) -> OpenAIServingModels:
    models: OpenAIServingModels = raw_request.app.state.openai_serving_models
    return models


def _is_anthropics(raw_request: Request) -> bool:
    return "anthropic-version" in raw_request.headers


def _in_anthropics_words(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }
