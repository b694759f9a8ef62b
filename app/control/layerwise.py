"""GET /api/v1/layerwise/stats: how long the layers of layerwise loads took, by replica.

It is read from what /metrics shows of the replicas (`deployments.transfer.layerwise_times`): there is one way to ask
them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from app.gate.auth import require_admin
from app.gate.request_context import current_request
from app.metrics.ingress import PartsMetrics

PATHS = frozenset({"/api/v1/layerwise/stats"})

_SAMPLE = re.compile(r"crosskv_layerwise_layer_(loads|load_ms|waits|wait_ms)_total\{(.*)\} (\S+)")
_LABEL = re.compile(r'(replica|layer)="(\d+)"')


def layerwise_router(parts: PartsMetrics) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.get("/api/v1/layerwise/stats")
    async def stats() -> dict[str, Any]:
        """How long layers took in layerwise loads, by replica and layer. For administrators.

        A replica that does not answer is left out.
        """
        require_admin(current_request().caller)
        return {"layer_times": layer_times(await parts.texts())}

    return router


def layer_times(texts: Sequence[str]) -> list[dict[str, Any]]:
    """By replica and layer: how many loads, the mean milliseconds that the layer took, and that the engine waited."""
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for text in texts:
        for name, labels, value in _SAMPLE.findall(text):
            place = {label: int(number) for label, number in _LABEL.findall(labels)}
            if len(place) == 2:
                sums[place["replica"], place["layer"]][name] += float(value)
    return [
        {
            "replica": replica,
            "layer": layer,
            "count": int(of["loads"]),
            "load_ms": of["load_ms"] / of["loads"] if of["loads"] else 0.0,
            "wait_ms": of["wait_ms"] / of["waits"] if of["waits"] else 0.0,
        }
        for (replica, layer), of in sorted(sums.items())
    ]
