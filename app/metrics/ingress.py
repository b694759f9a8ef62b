"""The ingress's own Prometheus metrics, and GET /metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics.labels import GONE_REASONS, OUTCOMES
from app.metrics.usage import SOURCES
from deployments.protocol.wire import KVCacheUsage

logger = logging.getLogger(__name__)

SOURCE_TIMEOUT_S = 2.0
"""A part that does not give its metrics in this time is left out of the answer, and counted."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


REFUSALS = ("no_key", "forbidden", "full", "tenant_share", "requests_per_minute", "tokens_per_minute")


MetricsSource = Callable[[], Awaitable[str]]
"""Gives one part's Prometheus text."""


class Queue(Protocol):
    """What is counted of the line in which prompts wait (`app.gate.admission`)."""

    ongoing: int
    count_refusal: Callable[[str], None]

    @property
    def waiting(self) -> int:
        """Prompts that wait for their turn."""


class IngressMetrics:
    """All metrics that the ingress writes, in one registry of its own (nothing is global, so tests do not meet)."""

    def __init__(self, registry: CollectorRegistry, queue: Queue) -> None:
        self.registry = registry
        self.requests = Counter(
            "crosskv_requests", "HTTP requests by path and status; status 499: the client went away.",
            ["path", "status"], registry=registry,
        )  # fmt: skip
        self.time_to_first_token = Histogram(
            "crosskv_time_to_first_token_seconds", "From a streamed request's arrival to its first token.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.queue_time = Histogram(
            "crosskv_queue_seconds", "From a prompt's arrival at the queue to its being sent to the replicas.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "crosskv_prompt_tokens", "Prompt tokens by where their KV came from.", ["source"], registry=registry
        )
        self.plans = Counter(
            "crosskv_plans", "Prompts by why their KV was loaded or computed (docs/concepts/loading.md).", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.generated_tokens = Counter("crosskv_generated_tokens", "Tokens sampled for clients.", registry=registry)
        self.aborted = Counter(
            "crosskv_aborted_prompts",
            "Prompts aborted because their client went away or time ran out.",
            registry=registry,
        )
        self.retried = Counter(
            "crosskv_retried_prompts", "Prompts sent to another replica after theirs was gone before its first output.",
            ["reason"], registry=registry,
        )  # fmt: skip
        for reason in GONE_REASONS:
            self.retried.labels(reason)
        self.constraints = Counter(
            "crosskv_constraints_checked", "Structured output constraints that were tried, by what came of it.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in OUTCOMES:
            self.constraints.labels(outcome)
        self.poison_prompts = Counter(
            "crosskv_poison_prompts", "Prompts that ended an engine: answered 500, and refused for a while.",
            registry=registry,
        )  # fmt: skip
        self.poison_refusals = Counter(
            "crosskv_poison_refusals", "Requests refused because their prompt had ended an engine.", registry=registry
        )
        self.missing_sources = Counter(
            "crosskv_metrics_sources_missing", "Times that a part did not give its metrics.", registry=registry
        )
        self.refused = Counter(
            "crosskv_refused_requests", "Requests refused for their key or their number (docs/guide/operations.md).",
            ["reason"],
            registry=registry,
        )  # fmt: skip
        for reason in REFUSALS:
            self.refused.labels(reason)
        queue.count_refusal = self.count_refusal
        for source in SOURCES:
            self.prompt_tokens.labels(source)
        Gauge("crosskv_prompts_ongoing", "Prompts sent to the replicas and not ended.", registry=registry).set_function(
            lambda: queue.ongoing
        )
        Gauge("crosskv_prompts_waiting", "Prompts that wait in the ingress.", registry=registry).set_function(
            lambda: queue.waiting
        )

    def count_constraint(self, outcome: str) -> None:
        """A constraint has been tried (`app.openai.constraint_worker`)."""
        self.constraints.labels(outcome).inc()

    def count_refusal(self, reason: str) -> None:
        """One request has been refused, for one of `REFUSALS`."""
        self.refused.labels(reason).inc()

    def count_prompt(self, usage: KVCacheUsage) -> None:
        """One prompt has been computed."""
        self.prompt_tokens.labels("device").inc(usage["device"])
        self.prompt_tokens.labels("cpu").inc(usage["cpu"])
        self.prompt_tokens.labels("redis").inc(usage["redis"])
        self.prompt_tokens.labels("recomputed").inc(usage["recomputed"])
        if reason := usage.get("reason"):
            self.plans.labels(reason).inc()


class MetricsMiddleware:
    """Counts every HTTP request by path and status."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics, paths: frozenset[str]) -> None:
        """`paths` are counted by name, all others together: a scanner must not create a time series per URL."""
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()


def join_families(texts: Sequence[str]) -> str:
    """Several Prometheus texts as one: a family that several parts have is described once, with all samples below."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    described, samples = families.setdefault("", ([], []))
    for text in texts:
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                known = name in families
                described, samples = families.setdefault(name, ([], []))
                if known:
                    described = []
            if line.startswith("#"):
                described.append(line)
            elif line:
                samples.append(line)
    lines = [line for described, samples in families.values() for line in (*described, *samples)]
    return "\n".join(lines) + "\n"


class PartsMetrics:
    """What the parts behind the ingress tell of themselves: asked at most once in `max_age_s`, for all who want it.

    A loop of requests costs the parts nothing more. Who comes while they are asked waits for the same answers.
    """

    def __init__(
        self,
        metrics: IngressMetrics,
        sources: Callable[[], Sequence[MetricsSource]],
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sources`: those that there are now (`Backend.metrics`); `clock`: seconds, does not jump."""
        self._metrics = metrics
        self._sources = sources
        self._max_age_s = max_age_s
        self._clock = clock
        self._texts: list[str] = []
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def texts(self) -> list[str]:
        """The text of every source, in their order; empty of one that did not answer in time."""
        if self._asking is None and self._clock() - self._asked_at >= self._max_age_s:
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        if self._asking is not None:
            await asyncio.shield(self._asking)  # a client that goes away does not end it for the others
        return self._texts

    async def _ask(self) -> None:
        try:
            self._texts = await asyncio.gather(*map(self._text_of, self._sources()))
        finally:
            self._asked_at, self._asking = self._clock(), None

    async def _text_of(self, source: MetricsSource) -> str:
        try:
            async with asyncio.timeout(SOURCE_TIMEOUT_S):
                return await source()
        except Exception:
            self._metrics.missing_sources.inc()
            logger.warning("a part gave no metrics", exc_info=True)
            return ""


def metrics_router(metrics: IngressMetrics, parts: PartsMetrics) -> APIRouter:
    """GET /metrics: the ingress's own as they are now, then what the other parts said lately."""
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Prometheus text: the metrics of the ingress, the replicas, the manager and the tiers."""
        others = await parts.texts()
        own = generate_latest(metrics.registry).decode()
        return Response(join_families([own, *others]), media_type=CONTENT_TYPE_LATEST)

    return router
