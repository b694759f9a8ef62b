"""A Serve deployment that is vLLM's own OpenAI server: the engine as AsyncLLM starts it, and nothing around it.

Leans on vLLM as Ray Serve LLM's own `VLLMEngine` does: `build_app` and `init_app_state` of
`vllm.entrypoints.openai.api_server`.
"""

from __future__ import annotations

import argparse
import types
from typing import Any


class PlainReplica:
    """`arguments` are AsyncEngineArgs and FrontendArgs by name. Wrapped by `ray.serve.ingress()`."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        known = set(AsyncEngineArgs.__dataclass_fields__)
        engine = AsyncEngineArgs(**{name: value for name, value in arguments.items() if name in known})
        frontend = FrontendArgs(**{name: value for name, value in arguments.items() if name not in known})
        self._arguments = argparse.Namespace(**(vars(frontend) | vars(engine)))
        self._llm = AsyncLLM.from_engine_args(engine, usage_context=UsageContext.OPENAI_API_SERVER)

    async def __serve_build_asgi_app__(self) -> Any:
        """Serve calls this once the engine is there."""
        from vllm.entrypoints.openai.api_server import build_app, init_app_state

        tasks = await self._llm.get_supported_tasks()
        app = build_app(self._arguments, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, self._arguments, tasks)
        # vLLM's handler of engine errors looks for the uvicorn server here; Serve restarts the replica by itself.
        app.state.server = types.SimpleNamespace()
        return app

    async def check_health(self) -> None:
        """Raises when the engine is dead; Serve then replaces the replica."""
        await self._llm.check_health()

    def __del__(self) -> None:
        """Serve calls this after the replica's last request."""
        self._llm.shutdown()
