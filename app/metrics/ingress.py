"""The ingress's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics.labels import (
    CHUNKS,
    FILLS,
    GONE_REASONS,
    HANDOVERS,
    OUTCOMES,
    PARTED,
    PARTED_DEFECT,
    RANKED,
    RETURNS,
    VOLUNTARY,
)
from app.metrics.left_out import KINDS as LEFT_OUT
from app.metrics.stages import STAGES
from app.metrics.usage import SOURCES
from deployments.protocol.wire import KVCacheUsage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGE_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, *_SECONDS)
_LOG2_ERRORS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

REFUSALS = ("no_key", "forbidden", "full", "tenant_share", "requests_per_minute", "tokens_per_minute")


class IngressMetrics:
    """All metrics that the ingress writes, in one registry of its own (nothing is global, so tests do not meet)."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        stage_time = Histogram(
            "crosskv_stage_seconds", "Of the time to a prompt's first token, by stage.",
            ["stage"], buckets=_STAGE_SECONDS, registry=registry,
        )  # fmt: skip
        self._stage_times = {stage: stage_time.labels(stage) for stage in STAGES}
        self.prompt_tokens = Counter(
            "crosskv_prompt_tokens", "Prompt tokens by where their KV came from; all but `recomputed` are reuse.",
            ["source"], registry=registry,
        )  # fmt: skip
        self.blended_tokens = Counter(
            "crosskv_blended_tokens", "Reused prompt tokens that were blended (docs/concepts/blending.md).",
            registry=registry,
        )  # fmt: skip
        self.chunks = Counter(
            "crosskv_prompt_chunks", "Chunks of blended prompts, and texts that were named as chunks and not found.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in CHUNKS:
            self.chunks.labels(outcome)
        self.chunk_fills = Counter(
            "crosskv_chunk_fills",
            "Chunks computed alone, by how that ended; `refused`: they may have ended a replica.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in FILLS:
            self.chunk_fills.labels(outcome)
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
        self.resumed = Counter(
            "crosskv_resumed_prompts",
            "Streams that went on at another replica; `moved` by hand, `drained`: Serve stops theirs, `rebalanced`: "
            "theirs was short of KV.",
            ["reason"], registry=registry,
        )  # fmt: skip
        for reason in GONE_REASONS + VOLUNTARY:
            self.resumed.labels(reason)
        self.resume_gap = Histogram(
            "crosskv_resume_gap_seconds", "From a resumed stream's last token at one replica to its first at the next.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.handovers = Counter(
            "crosskv_handovers",
            "Prompts that could be handed from prefill to decode, by outcome (docs/concepts/roles.md).",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in HANDOVERS:
            self.handovers.labels(outcome)
        self.handover_gap = Histogram(
            "crosskv_handover_gap_seconds", "From a prompt's first token at one replica to its second at another.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.constraints = Counter(
            "crosskv_constraints_checked", "Structured output constraints that were tried, by what came of it.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in OUTCOMES:
            self.constraints.labels(outcome)
        self.left_out = Counter(
            "crosskv_left_out", "What requests had and answers went without, by kind; the header `warnings` says it.",
            ["kind"], registry=registry,
        )  # fmt: skip
        for kind in LEFT_OUT:
            self.left_out.labels(kind)
        self.poison_prompts = Counter(
            "crosskv_poison_prompts",
            "Prompts that ended an engine: answered 500, and refused for a while. The log has their digests.",
            registry=registry,
        )  # fmt: skip
        self.poison_refusals = Counter(
            "crosskv_poison_refusals", "Requests refused because their prompt had ended an engine.", registry=registry
        )
        self.returned = Counter(
            "crosskv_answers_returned",
            "Answers by what the next prompt had in their place (docs/concepts/routing.md).",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in RETURNS:
            self.returned.labels(outcome)
        self.parted = Counter(
            "crosskv_parted_prompts",
            "Prompts that lost their whole prefix to a few tokens in front, by what those look like "
            "(docs/guide/troubleshooting.md).",
            ["cause"], registry=registry,
        )  # fmt: skip
        for cause in (*PARTED, PARTED_DEFECT):
            self.parted.labels(cause)
        self.unsaved_answers = Counter(
            "crosskv_unsaved_answers", "Answers whose KV was not stored, because answers like them do not come back.",
            registry=registry,
        )  # fmt: skip
        self.answer_length_error = Histogram(
            "crosskv_answer_length_log2_error", "How far answers' tokens are from what was expected: |log2(ratio)|.",
            buckets=_LOG2_ERRORS, registry=registry,
        )  # fmt: skip
        self.answer_lengths_ranked = Counter(
            "crosskv_answer_lengths_ranked", "Pairs of answers by whether the longer one was expected to be longer.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in RANKED:
            self.answer_lengths_ranked.labels(outcome)
        self.answer_length_defects = Counter(
            "crosskv_answer_length_defects", "Failures in expecting answers' lengths; without it nothing is expected.",
            registry=registry,
        )  # fmt: skip
        self.tenant_cost = Counter(
            "crosskv_tenant_cost",
            "What tenants were served, as fair shares count it: computed tokens, twice those sampled.",
            ["tenant"], registry=registry,
        )  # fmt: skip
        self.missing_sources = Counter(
            "crosskv_metrics_sources_missing", "Times that a part did not give its metrics.", registry=registry
        )
        self.refused = Counter(
            "crosskv_refused_requests",
            "Requests refused for a key (`no_key`, `forbidden`), for room (`full`, `tenant_share`), or for a rate.",
            ["reason"],
            registry=registry,
        )  # fmt: skip
        for reason in REFUSALS:
            self.refused.labels(reason)
        for source in SOURCES:
            self.prompt_tokens.labels(source)

    def show_queue(self, ongoing: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Show the queue's figures, read at each scrape."""
        for name, text, value in (
            ("crosskv_prompts_ongoing", "Prompts sent to the replicas and not ended.", ongoing),
            ("crosskv_prompts_waiting", "Prompts that wait in the ingress.", waiting),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)

    def show_chunks_waiting(self, waiting: Callable[[], int]) -> None:
        """Show how many chunks wait for idle time, read at each scrape."""
        Gauge("crosskv_chunks_waiting", "Chunks that wait for idle time.", registry=self.registry).set_function(waiting)

    def show_replicas(self, least: int) -> None:
        """How many the settings want; that does not change while the ingress lives."""
        Gauge(
            "crosskv_replicas_least", "Replicas that are set; the lower bound where their number follows the load.",
            registry=self.registry,
        ).set(least)  # fmt: skip

    def show_answers(self, nbytes: Callable[[], int], places: Callable[[], int], forgotten: Callable[[], int]) -> None:
        """Show the figures of the memory of sampled answers, read at each scrape."""
        for name, text, value in (
            ("crosskv_answer_memory_bytes", "Bytes of remembered answers (http.answer_memory_bytes).", nbytes),
            ("crosskv_answer_memory_prompts", "Prompts whose answers are remembered.", places),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)
        name, text = "crosskv_answer_memory_forgotten", "Prompts whose answers made room for others."
        self.registry.register(_CountElsewhere(name, text, forgotten))

    def count_returned(self, outcome: str) -> None:
        """An answer's conversation has gone on; one of `app.metrics.labels.RETURNS`."""
        self.returned.labels(outcome).inc()

    def count_parted(self, cause: str) -> None:
        """A prompt has parted from those before it; one of `app.metrics.labels.PARTED`, or `PARTED_DEFECT`."""
        self.parted.labels(cause).inc()

    def count_chunks(self, outcome: str, number: int) -> None:
        """A blended prompt's chunks have been looked for; one of `app.metrics.labels.CHUNKS`."""
        self.chunks.labels(outcome).inc(number)

    def count_fill(self, outcome: str, number: int = 1) -> None:
        """The computation of chunks alone has ended; one of `app.metrics.labels.FILLS`."""
        self.chunk_fills.labels(outcome).inc(number)

    def count_constraint(self, outcome: str) -> None:
        """A constraint has been tried (`app.openai.constraint_worker`)."""
        self.constraints.labels(outcome).inc()

    def count_resumed(self, reason: str, gap_s: float | None) -> None:
        """A stream went on elsewhere; `gap_s`: its client's pause, None before its first token."""
        self.resumed.labels(reason).inc()
        if gap_s is not None:
            self.resume_gap.observe(gap_s)

    def count_handover(self, outcome: str, gap_s: float | None = None) -> None:
        """What became of a prompt that could be handed over; one of `app.metrics.labels.HANDOVERS`.

        `gap_s`: its client's pause behind the first token, of one that was.
        """
        self.handovers.labels(outcome).inc()
        if gap_s is not None:
            self.handover_gap.observe(gap_s)

    def count_refusal(self, reason: str) -> None:
        """One request has been refused, for one of `REFUSALS`."""
        self.refused.labels(reason).inc()

    def count_left_out(self, kind: str, number: int) -> None:
        """An answer goes without what its request has so often; one of `app.metrics.left_out.KINDS`."""
        self.left_out.labels(kind).inc(number)

    def count_stages(self, seconds: Mapping[str, float]) -> None:
        """Observe the stages of a prompt that has ended."""
        for stage, spent in seconds.items():
            self._stage_times[stage].observe(spent)

    def count_prompt(self, usage: KVCacheUsage) -> None:
        """One prompt has been computed."""
        self.prompt_tokens.labels("device").inc(usage["device"])
        self.prompt_tokens.labels("cpu").inc(usage["cpu"])
        self.prompt_tokens.labels("redis").inc(usage["redis"])
        self.prompt_tokens.labels("recomputed").inc(usage["recomputed"])
        self.blended_tokens.inc(usage.get("blended", 0))
        if reason := usage.get("reason"):
            self.plans.labels(reason).inc()


class _CountElsewhere(Collector):
    """A counter whose value is kept elsewhere, and read at each scrape."""

    def __init__(self, name: str, text: str, count: Callable[[], int]) -> None:
        self._name, self._text, self._count = name, text, count

    def collect(self) -> Iterable[Metric]:
        """The one family."""
        yield CounterMetricFamily(self._name, self._text, value=self._count())


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
