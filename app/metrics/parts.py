"""GET /metrics: the ingress's own metrics, and what the parts behind it say of themselves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.responses import PlainTextResponse, Response

from app.metrics.ingress import IngressMetrics
from deployments.protocol.families import Families

logger = logging.getLogger(__name__)

MetricsSource = Callable[[], Awaitable[Iterable[Metric]]]
"""One part's families, as they are now."""
SOURCE_TIMEOUT_S = 2.0
"""A part that does not give its metrics in this time is left out of the answer, and counted."""
MAX_AGE_S = 1.0
"""What parts said is said again for this time."""
LEAST_AGE_S = 0.1
"""The same, where the figures of now are wanted: a client that loops costs the parts no more than that."""


class PartsMetrics:
    """What the parts behind the ingress tell of themselves: asked at most once in `MAX_AGE_S`, for all callers.

    A loop of requests costs the parts nothing more. A request that comes while they are asked waits for those answers.
    One that wants the figures of now waits for the next ones, which begin `LEAST_AGE_S` after the last at the earliest.
    """

    def __init__(
        self,
        metrics: IngressMetrics,
        sources: Callable[[], Sequence[MetricsSource]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sources`: those that there are now (`Backend.metrics`); `clock`: seconds, does not jump."""
        self._metrics = metrics
        self._sources = sources
        self._clock = clock
        self._families: list[Metric] = []
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._begun = self._answered = 0
        """Rounds of asking: of the last one that has begun, and of the one whose answers are there, the number."""

    async def families(self, fresh: bool = False) -> list[Metric]:
        """What every source said, in their order; nothing of one that did not answer in time. `fresh`: it is of now."""
        is_old = self._begun == self._answered and self._clock() - self._asked_at >= MAX_AGE_S
        wanted = self._begun + (fresh or is_old)
        while self._answered < wanted:
            if self._asking is None:
                self._asking = asyncio.get_running_loop().create_task(self._ask())
            await asyncio.shield(self._asking)  # a client that goes away does not end it for the others
        return self._families

    async def _ask(self) -> None:
        try:
            await asyncio.sleep(max(0.0, self._asked_at + LEAST_AGE_S - self._clock()))
            self._begun += 1
            answers = await asyncio.gather(*map(self._families_of, self._sources()))
            self._families = [family for answer in answers for family in answer]
            self._answered = self._begun
        finally:
            self._asked_at, self._asking = self._clock(), None

    async def _families_of(self, source: MetricsSource) -> list[Metric]:
        try:
            async with asyncio.timeout(SOURCE_TIMEOUT_S):
                return list(await source())
        except Exception:
            self._metrics.missing_sources.inc()
            logger.warning("a part gave no metrics", exc_info=True)
            return []


def metrics_router(metrics: IngressMetrics, parts: PartsMetrics) -> APIRouter:
    """GET /metrics: the ingress's own as they are now, then what the other parts said lately."""
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics(request: Request) -> Response:
        """Prometheus text: the metrics of the ingress, the replicas, the manager and the tiers.

        What the parts behind the ingress say is up to a second old, and of now for a request with
        `Cache-Control: no-cache`: they tell it at most ten times a second.
        """
        others = await parts.families(fresh="no-cache" in request.headers.get("cache-control", "").lower())
        shown = CollectorRegistry()
        shown.register(Families([*metrics.registry.collect(), *others]))
        return Response(generate_latest(shown), media_type=CONTENT_TYPE_LATEST)

    return router
