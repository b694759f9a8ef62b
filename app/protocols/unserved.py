"""What is said where clients of OpenAI or Anthropic ask for what is not served here: 404, and what is."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app.gate.auth import route_path
from app.gate.errors import answer_router_error, error_response
from app.gate.not_done import KEEPS_NOTHING

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
