"""The ingress as one ASGI application. Pure: no Ray in here, everything behind it is a `Backend`.

Middlewares, outermost first: name the request, count it, answer browsers' preflights, give errors a protocol's shape,
answer defects, add Retry-After, check the key, hold its tenant to its rate, limit the body, give it its context.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext

from app.answers.lengths import ExpectedLengths
from app.answers.returns import Returns
from app.backend.health import health_router
from app.backend.protocols import Backend
from app.continuation import moves as stream_moves
from app.continuation.handover import Handovers, handover_choice
from app.continuation.moves import StreamRebalancing, requests_router
from app.control import administrators
from app.control import api as control_api
from app.control import diverge as kv_diverge
from app.control import moves as kv_moves
from app.control import orders as kv_orders
from app.control.administrators import administrators_router
from app.control.api import control_router
from app.control.audit import audited
from app.control.diverge import diverge_router
from app.control.jobs import Jobs
from app.control.moves import moves_router
from app.control.orders import orders_router
from app.divergence.recent_prefixes import RecentPrefixes
from app.events import watchers
from app.events.decisions import Decisions
from app.events.feed import Feed, Sources
from app.events.figures import LivePrompt
from app.events.watchers import events_router
from app.extensions import ingress_extensions
from app.gate.admission import AdmissionQueue
from app.gate.auth import METRICS, OPEN_PATHS, ApiKeys, AuthMiddleware
from app.gate.body_limit import BODY_TIMEOUT_S, OPEN_BODIES_BYTES, BodyLimitMiddleware, LingerMiddleware, OpenBodies
from app.gate.errors import DefectMiddleware, RetryAfterMiddleware
from app.gate.json_route import add_routes, takes_body
from app.gate.observed_prompt import PromptObserver
from app.gate.prompt_extra import FrontParts, RouteParts, SendParts
from app.gate.rates.limits import RateLimitMiddleware, RateLimits
from app.gate.request_context import STREAM_TIMEOUT_S, RequestContextMiddleware, RequestLimits
from app.gate.request_id import RequestIdMiddleware
from app.metrics.ingress import IngressMetrics, MetricsMiddleware
from app.metrics.left_out import HEADER as LEFT_OUT
from app.metrics.parts import PartsMetrics, metrics_router
from app.observe.traces import open_traces
from app.openai import api as openai_api
from app.openai import openapi_schema
from app.openai.api import add_openai_routes
from app.openai.chat_renderer import build_chat_renderer, remembered_answers, time_tokenizing
from app.openai.constraint_pool import TRIAL_TIMEOUT_S, ConstraintPool
from app.openai.engine_client import FrontEnd, HandleEngineClient, PromptKV, PromptTurns
from app.openai.observers import PartingPrompts, RememberedChats
from app.openai.poison_registry import REFUSED_S, PoisonRegistry
from app.openai.prompt_keys import FidelityRule, PromptKeys
from app.openai.retries import PromptSender
from app.openai.user_text import keep_user_text
from app.page.files import page_router
from app.protocols import routes as protocols
from app.protocols.error_words import ErrorWordsMiddleware
from app.protocols.routes import add_protocol_routes, answer_unserved
from configs.settings import Settings
from deployments.engine.checks import keeps_states
from deployments.engine.engine_args import block_bytes
from kvmanager.segments.keys import EXACT, TOLERANT, AdapterName
from kvmanager.segments.server_secret import ServerSecret

_COUNTED_PATHS = openai_api.PATHS.union(
    protocols.PATHS,
    control_api.PATHS,
    kv_moves.PATHS,
    kv_orders.PATHS,
    kv_diverge.PATHS,
    watchers.PATHS,
    administrators.PATHS,
    stream_moves.PATHS,
    openapi_schema.PATHS,
    OPEN_PATHS,
)
_RATES = [f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")]
EXPOSED = ("x-request-id", "request-id", "retry-after", LEFT_OUT, *_RATES)
"""Headers of an answer that a page of another origin may read, in addition to those that every page may."""
PREFLIGHT_S = 600


def create_app(
    settings: Settings,
    vllm_config: VllmConfig,
    backend: Backend,
    fingerprint: bytes,
    secret: ServerSecret,
    *,
    loopback: bool,
    registry: CollectorRegistry | None = None,
    behind_serve: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The whole HTTP surface.

    `vllm_config` is the replicas' configuration (`frontend_config`): model, lengths and block size must be theirs, or
    the keys computed here are not the keys of their blocks. `fingerprint` is `ModelIdentity.fingerprint()`, theirs too.
    `secret` keys the names of all KV. `loopback`: only this machine can reach the server.
    `behind_serve`: Ray Serve tells clients their requests' ids. `clock`: of rates per minute, in seconds.
    Call it in the process, and use it on the event loop, that serves it; loads the tokenizer, no weights.
    """
    http = settings.http
    queue = AdmissionQueue.from_settings(settings)
    backend.follow_replicas(queue.follow)
    metrics = IngressMetrics(registry or CollectorRegistry())
    metrics.show_queue(lambda: queue.ongoing, lambda: queue.waiting)
    metrics.show_replicas(settings.min_replicas)
    queue.count_refusal = metrics.count_refusal
    queue.count_cost = lambda tenant, cost: metrics.tenant_cost.labels(keys.tag(tenant)).inc(cost)
    parts = PartsMetrics(metrics, backend.metrics)
    extensions = ingress_extensions(settings)
    counted = _COUNTED_PATHS.union(*(one.paths for one in extensions.values()))
    variants = {fidelity: variant for one in extensions.values() for fidelity, variant in one.variants.items()}
    served = EXACT, TOLERANT, *variants
    fidelity = FidelityRule(settings.kv.fidelity, settings.of_tenants("fidelity"), served)
    adapters = {
        name: AdapterName(name, adapter.pinned().sha256 or "")
        for name, adapter in settings.engine.lora_adapters.items()
    }
    keys = PromptKeys(
        secret, fingerprint, vllm_config.cache_config.block_size, fidelity, variants, adapters, settings.model_name
    )
    renderer = renderer_from_config(vllm_config)
    keep_user_text(renderer)
    time_tokenizing(renderer)
    prefixes = RecentPrefixes(http.tenants, settings.kv.segment_tokens, renderer.get_tokenizer(), metrics.count_parted)
    online, returns = build_chat_renderer(settings, vllm_config, renderer), Returns(settings.kv.save_answers)
    answers = remembered_answers(online, http, returns, metrics)
    online.give_back(keys, answers)
    front = FrontParts(keys, renderer, online.chat_template, metrics)
    extras = {name: extension.extra(front) for name, extension in extensions.items()}
    decisions = Decisions(lambda replica: backend.replicas.rank_of(replica))
    traces = open_traces(http.otlp_endpoint) if http.otlp_endpoint is not None else None
    observers: list[PromptObserver] = [PartingPrompts(prefixes), decisions]
    observers += [RememberedChats(answers)] if answers is not None else []
    observers += [traces] if traces is not None else []
    constraints = ConstraintPool(vllm_config, TRIAL_TIMEOUT_S, metrics.count_constraint)
    # Not sooner: it would take from the start of the replicas, which a whole server waits for.
    backend.follow_replicas(lambda replicas: constraints.start() if replicas else None)
    lengths = ExpectedLengths(
        http.tenants, keys.block_size, settings.blocks_per_segment, http.answer_lengths_bytes, metrics
    )
    handovers = None
    if settings.roles.on:
        lacking, block = backend.replicas.lacking_tokens, keys.block_size
        choice = handover_choice(settings.roles.split, block)
        handovers = Handovers(choice, settings.handover_deadline_s, lacking, metrics.count_handover)
    poison = PoisonRegistry(REFUSED_S)
    sender = PromptSender(backend.replicas, metrics, settings.max_replicas, poison, handovers)
    sends = SendParts(keys, sender, backend.control)
    made = {name: extension.preparation(sends) for name, extension in extensions.items()}
    preparations = {name: preparation for name, preparation in made.items() if preparation is not None}
    observers += preparations.values()
    engine = HandleEngineClient(
        FrontEnd(vllm_config, renderer, constraints),
        PromptKV(keys, returns, extras),
        PromptTurns(queue, lengths, tuple(preparations.values())),
        sender,
        metrics,
        observers,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        rebalancing = None
        if settings.routing.rebalance_streams:
            streams = StreamRebalancing(engine.live, backend.replicas, settings.block_size_tokens)
            rebalancing = asyncio.get_running_loop().create_task(streams.run())
        yield
        if rebalancing is not None:
            rebalancing.cancel()
        for preparation in preparations.values():
            preparation.close()
        engine.shutdown()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    limits = RequestLimits(http.request_timeout_s, STREAM_TIMEOUT_S)
    app: FastAPI = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=[
            Middleware(LingerMiddleware),
            Middleware(RequestIdMiddleware, behind_serve, http.log_format == "json"),
            Middleware(MetricsMiddleware, metrics, counted),
            *_cors(http.cors_origins),
            Middleware(ErrorWordsMiddleware),
            Middleware(DefectMiddleware),
            Middleware(RetryAfterMiddleware),
            Middleware(
                AuthMiddleware,
                ApiKeys(http.keys),
                http.metrics_key,
                loopback,
                metrics.count_refusal,
                http.host_names,
            ),
            Middleware(RateLimitMiddleware, RateLimits(settings, metrics.count_refusal, clock)),
            Middleware(
                BodyLimitMiddleware,
                int(http.max_body_bytes),
                BODY_TIMEOUT_S,
                OpenBodies(OPEN_BODIES_BYTES, int(http.max_body_bytes)),
                takes_body,
            ),
            Middleware(RequestContextMiddleware, queue, limits, metrics.count_left_out),
        ],
    )
    add_openai_routes(app, engine, online, settings)
    add_protocol_routes(app, engine, online, settings)
    add_routes(app, control_router(backend.control, online, keys, extras, keeps_states(vllm_config)))
    jobs = Jobs(http.tenants)
    add_routes(app, moves_router(backend.control, online, keys, jobs))
    add_routes(app, orders_router(backend.control, online, keys, jobs))
    add_routes(app, diverge_router(backend.control, online, keys, prefixes))
    add_routes(app, _live_router(engine, decisions, backend, queue, parts))
    routes = RouteParts(keys, online, jobs)
    for name, extension in extensions.items():
        router = extension.router(extras[name], made[name], routes)
        if router is not None:
            add_routes(app, router)
    add_routes(app, requests_router(engine.live, backend.replicas, audited))
    add_routes(app, health_router(backend.health, queue, settings.scenario))
    add_routes(app, metrics_router(metrics, parts))
    add_routes(app, administrators_router(settings, vllm_config, parts))
    add_routes(app, page_router())
    openapi_schema.add_description(app, OPEN_PATHS - {METRICS})
    app.add_exception_handler(HTTPException, answer_unserved)
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """The middleware for browsers' pages of these origins, to stand before the one that checks keys; none without any.

    It answers the preflight that comes before a key. Credentials, which are cookies, are never allowed: a page sends
    its key in a header of its own, as other clients do, so no page can use a key that it does not have.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_S,
        )
    ]


def _live_router(
    engine: HandleEngineClient, decisions: Decisions, backend: Backend, queue: AdmissionQueue, parts: PartsMetrics
) -> APIRouter:
    """GET /api/v1/events. `decisions` tell the watchers where prompts of `engine` are sent."""
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


def frontend_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """The configuration of an engine with these arguments, without the engine: loads no weights.

    Give it the replicas' own arguments; a KV connector among them is ignored, as it lives in the replicas.
    """
    own = copy.copy(engine_args)
    own.kv_transfer_config = None
    return own.create_engine_config(UsageContext.OPENAI_API_SERVER)
