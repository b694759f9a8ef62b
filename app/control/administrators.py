"""What administrators alone are shown: the settings in effect, and how long layers took in layerwise loads.

GET /api/v1/settings says the settings without secrets; `crosskv doctor` reads them. GET /api/v1/layerwise/stats is read
from what /metrics shows of the replicas (`deployments.transfer.layerwise_times`): there is one way to ask them.

Leans on vLLM (0.32.0): `ModelConfig.get_num_layers` and `max_model_len`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from prometheus_client.core import Metric

from app.control.settings_shown import ModelShape, settings_shown
from app.gate.auth import require_admin
from app.gate.request_context import current_request
from app.metrics.parts import PartsMetrics
from configs.settings import Settings
from deployments.engine.engine_args import block_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

PATHS = frozenset({"/api/v1/settings", "/api/v1/layerwise/stats"})

_LAYER = "crosskv_layerwise_layer_"


def administrators_router(settings: Settings, vllm_config: VllmConfig, parts: PartsMetrics) -> APIRouter:
    """The routes. What the settings come to is made once: it does not change while the server runs."""
    router = APIRouter()
    shown = settings_shown(settings, _shape(vllm_config))

    @router.get("/api/v1/settings")
    async def show_settings() -> dict[str, Any]:
        """The settings in effect, without secrets, and what the empty ones come to here. For administrators.

        `machine` is the ingress's.
        """
        require_admin(current_request().caller)
        return shown

    @router.get("/api/v1/layerwise/stats")
    async def stats() -> dict[str, Any]:
        """How long layers took in layerwise loads, by replica and layer. For administrators.

        `count`: loads that brought the layer. `load_ms` and `wait_ms` are null while there is nothing to average.
        A replica that does not answer, or shares no KV, is left out.
        """
        require_admin(current_request().caller)
        return {"layer_times": layer_times(await parts.families())}

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


def layer_times(families: Iterable[Metric]) -> list[dict[str, Any]]:
    """By replica and layer: how many loads, the mean milliseconds that the layer took, and that the engine waited.

    None for the mean of nothing.
    """
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in families:
        if family.name.startswith(_LAYER):
            for sample in family.samples:
                place = int(sample.labels["replica"]), int(sample.labels["layer"])
                sums[place][family.name.removeprefix(_LAYER)] += sample.value
    return [
        {
            "replica": replica,
            "layer": layer,
            "count": int(of["loads"]),
            "load_ms": of["load_ms"] / of["loads"] if of["loads"] else None,
            "wait_ms": of["wait_ms"] / of["waits"] if of["waits"] else None,
        }
        for (replica, layer), of in sorted(sums.items())
    ]
