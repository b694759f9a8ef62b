"""The ingress as a Serve deployment: builds the ASGI application in the process that serves it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import serve

from configs.settings import load_settings
from deployments.engine_args import engine_args, engine_environment, model_identity
from kvmanager.server_secret import ServerSecret

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle


@serve.ingress()
class Ingress:
    """Holds no engine and no weights; vLLM is imported for its serving classes and the tokenizer."""

    def __init__(self, args: Mapping[str, Any], secret: ServerSecret, replicas: DeploymentHandle) -> None:
        self._settings = load_settings(args)
        self._secret = secret
        self._replicas = replicas
        os.environ.update(engine_environment(self._settings))

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once, on the replica's event loop, after the constructor."""
        from app.ingress import create_app, frontend_config
        from app.serve_backend import serve_backend

        app_name = serve.get_replica_context().app_name
        config = frontend_config(engine_args(self._settings))
        backend = serve_backend(self._replicas, app_name, self._settings)
        return create_app(self._settings, config, backend, model_identity(config).fingerprint(), self._secret)
