"""A tiny application in the real one's place: what the launcher needs of it, and ways to fail on request."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from configs.settings import load_settings


@serve.deployment(ray_actor_options={"num_cpus": 1})
class Stub:
    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/health":
            return JSONResponse({"status": "ok"})
        if request.url.path == "/v1/completions":
            return JSONResponse({"choices": [{"text": " there"}]})
        return JSONResponse({"error": "no such path"}, status_code=404)


def build(args: dict[str, Any]) -> Application:
    load_settings(args)
    return Stub.options(num_replicas=args["replicas"]).bind()


def build_broken(args: dict[str, Any]) -> Application:
    raise RuntimeError("the stub cannot be built")
