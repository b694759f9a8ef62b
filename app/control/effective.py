"""GET /api/v1/settings: the settings in effect, without secrets, for administrators. `crosskv doctor` reads them.

Leans on vLLM (0.32.0): `ModelConfig.get_num_layers` and `max_model_len`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from app.control.settings_shown import ModelShape, settings_shown
from app.gate.auth import require_admin
from app.gate.request_context import current_request
from configs.settings import Settings
from deployments.engine.engine_args import block_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

PATHS = frozenset({"/api/v1/settings"})


def settings_router(settings: Settings, vllm_config: VllmConfig) -> APIRouter:
    """The route. What it says is made once: it does not change while the server runs."""
    router = APIRouter()
    shown = settings_shown(settings, _shape(vllm_config))

    @router.get("/api/v1/settings")
    async def show_settings() -> dict[str, Any]:
        """The settings in effect, without secrets, and what the empty ones come to here. For administrators.

        `machine` is the ingress's.
        """
        require_admin(current_request().caller)
        return shown

    return router


def _shape(vllm_config: VllmConfig) -> ModelShape | None:
    """None for a model whose KV has no such shape (state-space): it is not shared either."""
    model = vllm_config.model_config
    try:
        layers = model.get_num_layers(vllm_config.parallel_config)
        per_token = block_bytes(vllm_config) // vllm_config.cache_config.block_size
        return ModelShape(layers, per_token, model.max_model_len)
    except Exception:
        logger.info("this model's KV per token is not known", exc_info=True)
        return None
