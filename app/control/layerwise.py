"""GET /api/v1/layerwise/stats: how long the layers of layerwise loads took, by replica.

It is read from what /metrics shows of the replicas (`deployments.transfer.layerwise_times`): there is one way to ask
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import Metric

from app.gate.auth import require_admin
from app.gate.request_context import current_request
from app.metrics.parts import PartsMetrics

PATHS = frozenset({"/api/v1/layerwise/stats"})

_PREFIX = "crosskv_layerwise_layer_"


def layerwise_router(parts: PartsMetrics) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.get("/api/v1/layerwise/stats")
    async def stats() -> dict[str, Any]:
        """How long layers took in layerwise loads, by replica and layer. For administrators.

        `count`: loads that brought the layer. `load_ms` and `wait_ms` are null while there is nothing to average.
        A replica that does not answer, or shares no KV, is left out.
        """
        require_admin(current_request().caller)
        return {"layer_times": layer_times(await parts.families())}

    return router


def layer_times(families: Iterable[Metric]) -> list[dict[str, Any]]:
    """By replica and layer: how many loads, the mean milliseconds that the layer took, and that the engine waited.

    None for the mean of nothing.
    """
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in families:
        if family.name.startswith(_PREFIX):
            for sample in family.samples:
                place = int(sample.labels["replica"]), int(sample.labels["layer"])
                sums[place][family.name.removeprefix(_PREFIX)] += sample.value
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
