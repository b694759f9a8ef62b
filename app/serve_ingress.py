"""The ingress as a Serve deployment: builds the ASGI application in the process that serves it."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve

from configs.settings import Settings, load_settings
from deployments.engine.engine_args import engine_args, engine_environment
from deployments.engine.model_identity import model_identity, why_not_shared
from deployments.protocol.log_lines import set_up_log
from deployments.protocol.memory import keep_giving_back, modules_set_aside
from deployments.replica.serve_process import bind_to_node
from kvmanager.segments.server_secret import ServerSecret

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle
    from vllm.config import VllmConfig

    from app.backend.protocols import Backend


@serve.ingress()
class Ingress:
    """Holds no engine and no weights; vLLM is imported for its serving classes and the tokenizer."""

    def __init__(self, args: Mapping[str, Any], secret: ServerSecret, replicas: DeploymentHandle) -> None:
        bind_to_node()
        self._settings = load_settings(args)
        self._secret = secret
        self._replicas = replicas
        os.environ.update(engine_environment(self._settings))
        set_up_log(self._settings.http.log_format)
        keep_giving_back()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once, on the replica's event loop, after the constructor."""
        with modules_set_aside():
            from app.gate.bound_host import is_loopback, require_guarded, serve_host
            from app.ingress import create_app, frontend_config

        settings, host = self._settings, await serve_host()
        require_guarded(settings, host)
        config = frontend_config(engine_args(settings))
        backend = backend_as_shared(self._replicas, serve.get_replica_context().app_name, settings, config)
        fingerprint = model_identity(config, settings).fingerprint()
        only_here = is_loopback(host)
        app = create_app(settings, config, backend, fingerprint, self._secret, loopback=only_here, behind_serve=True)
        gc.collect()
        gc.freeze()  # half a million objects, which stay: looking through them would stop the loop for .4 s each time
        return app


def backend_as_shared(replicas: DeploymentHandle, app_name: str, settings: Settings, config: VllmConfig) -> Backend:
    """The backend; where the model cannot be identified, one without shared KV, whose health says why."""
    from app.backend.health import with_part
    from app.backend.serve import serve_backend

    why = why_not_shared(config) if settings.kv.enabled else None
    if why is None:
        return serve_backend(replicas, app_name, settings)
    backend = serve_backend(replicas, app_name, settings.without_shared_kv())
    return replace(backend, health=with_part(backend.health, "kv_sharing", f"off: {why}"))
