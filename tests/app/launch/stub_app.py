"""A tiny application in the real one's place: what the launcher needs of it, and ways to fail on request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.cluster_checks import check_cluster
from configs.settings import load_settings
from deployments.replica.serve_process import bind_to_node


@serve.deployment(ray_actor_options={"num_cpus": 1})
class Stub:
    def __init__(self, parts: dict[str, Any]) -> None:
        bind_to_node()
        self._parts = parts
        self._asked = 0

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/health":
            self._asked += 1
            come = {"redis": {"state": "ok", "indexing": False}} if self._parts["redis"]["indexing"] else {}
            return JSONResponse({"status": "ok", "parts": self._parts | (come if self._asked > 8 else {})})
        if request.url.path == "/slow":
            await asyncio.to_thread(Path(request.query_params["arrived"]).touch)
            await asyncio.sleep(3)
            return JSONResponse({"answer": "whole"})
        if request.url.path == "/v1/chat/completions":
            return JSONResponse({"choices": [{"text": " there"}]})
        return JSONResponse({"error": "no such path"}, status_code=404)


def build(args: dict[str, Any]) -> Application:
    return _build(args, {"replicas": {"state": "ok"}, "redis": {"state": "not there yet", "indexing": True}})


def build_ailing(args: dict[str, Any]) -> Application:
    redis = {"state": "running with two tiers: [redis://cache:6379] refuses connections", "indexing": False}
    return _build(args, {"replicas": {"state": "ok"}, "redis": redis, "cpu_tier": {"state": "missing"}})


def build_broken(args: dict[str, Any]) -> Application:
    raise RuntimeError("the stub cannot be built")


@serve.deployment
class Failing:
    def __init__(self) -> None:
        raise AssertionError("the stub needs at least one group")


def build_failing(args: dict[str, Any]) -> Application:
    return Failing.options(name="Failing").bind()


def _build(args: dict[str, Any], parts: dict[str, Any]) -> Application:
    check_cluster(load_settings(args))
    return Stub.options(num_replicas=args["replicas"]).bind(parts)
