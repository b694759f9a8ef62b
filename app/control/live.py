"""GET /api/v1/events: what feeds the watchers (`app.events`) with this ingress's own knowledge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter

from app.backend.protocols import Backend
from app.events.api import events_router
from app.events.feed import Feed, Sources
from app.events.figures import LivePrompt
from app.gate.admission import AdmissionQueue
from app.metrics.parts import PartsMetrics
from app.openai.engine_client import HandleEngineClient
from deployments.engine.engine_args import block_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def live_router(
    engine: HandleEngineClient, backend: Backend, queue: AdmissionQueue, parts: PartsMetrics, config: VllmConfig
) -> APIRouter:
    """The route; from now on `engine` tells the watchers where its prompts are sent."""
    replicas, decisions = backend.replicas, engine.decisions

    def prompts() -> Iterator[LivePrompt]:
        for one in engine.live.all():
            waits = not one.attempts.answered.num_tokens
            yield LivePrompt(one.tenant, replicas.rank_of(one.attempts.replica), one.prompt_tokens, waits)

    sources = Sources(
        tag=engine.keys.tag,
        live=prompts,
        ranks=lambda: replicas.ranks(),
        queue=lambda: {"ongoing": queue.ongoing, "waiting": queue.waiting},
        families=parts.families,
        block_bytes=block_bytes(config),
        ending=backend.ending,
    )
    decisions.rank_of = lambda replica: replicas.rank_of(replica)
    Feed(backend.control, decisions, sources)  # the watchers hold it
    return events_router(decisions.watchers)
