"""GET /api/v1/events: what feeds the watchers (`app.events`) with this ingress's own knowledge."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter

from app.backend.protocols import Backend
from app.events.api import events_router
from app.events.decisions import Decisions
from app.events.feed import Feed, Sources
from app.events.figures import LivePrompt
from app.gate.admission import AdmissionQueue
from app.metrics.parts import PartsMetrics
from app.openai.engine_client import HandleEngineClient
from deployments.engine.engine_args import block_bytes


def live_router(
    engine: HandleEngineClient, decisions: Decisions, backend: Backend, queue: AdmissionQueue, parts: PartsMetrics
) -> APIRouter:
    """The route. `decisions` tell the watchers where prompts of `engine` are sent."""
    replicas = backend.replicas

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
        block_bytes=block_bytes(engine.vllm_config),
        ending=backend.ending,
    )
    Feed(backend.control, decisions, sources)  # the watchers hold it
    return events_router(decisions.watchers)
