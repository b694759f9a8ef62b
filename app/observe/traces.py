"""OpenTelemetry traces of prompts (`http.otlp_endpoint`), one trace each, off by default.

A prompt's spans are made when it has ended, of the laps that `app.metrics.stages` has timed: nothing is timed twice,
and a request pays nothing before. They say how much and how long, and hold no text.

A client's `traceparent` is a link from the prompt's span to the client's own, and no more: it chooses neither our
trace's id nor whether there is one. Spans wait in a bounded queue for a thread that sends them; what finds it full is
dropped.

Leans on OpenTelemetry's SDK 1.45, which comes with vLLM and is imported when traces are wanted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from app.metrics.stages import ANSWER, RequestStages
from deployments.protocol.log_lines import REQUEST_ID

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer
    from vllm.outputs import RequestOutput

    from app.gate.observed_prompt import SentPrompt
    from app.gate.request_context import RequestContext
    from deployments.protocol.wire import KVCacheUsage

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 5.0
SPANS = {
    "parse": ("parse",),
    "render": ("render", "tokenize"),
    "admit": ("check", "hash", "turn"),
    "route": ("route", "handle"),
    "plan": ("plan",),
    "queue": ("queue",),
    "load": ("load",),
    "prefill": ("step",),
    "return": ("output", "back"),
}
"""The spans before a prompt's first token, in their order, and the stages that each is made of; `decode` follows."""
_TIERS = ("cpu", "redis")


class Traces:
    """Makes spans of prompts that have ended. On the ingress's event loop."""

    def __init__(self, exporter: SpanExporter) -> None:
        """`exporter`: gets the spans, on a thread of the SDK's."""
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "crosskv"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("crosskv")

    def begin(self, prompt: SentPrompt) -> Trace:
        """Return what makes the spans of a prompt when it has ended, in whatever way."""
        return Trace(self._tracer, prompt)

    def close(self) -> None:
        """Send what waits. Takes `EXPORT_TIMEOUT_S` and more where no collector listens."""
        self._provider.shutdown()


class Trace:
    """Of one prompt."""

    def __init__(self, tracer: Tracer, prompt: SentPrompt) -> None:
        self._tracer = tracer
        self._prompt = prompt
        self._request_id = REQUEST_ID.get()
        self._sampled = 0
        self._first_at = 0.0

    def hear(self, output: RequestOutput, replica: str) -> None:
        """The next output of the prompt, from whichever replica."""
        self._first_at = self._first_at or time.monotonic()
        self._sampled += sum(len(answer.token_ids) for answer in output.outputs)

    def end(self, failed: str) -> None:
        """Make the spans. Raises nothing."""
        try:
            self._make(failed)
        except Exception:
            logger.exception("request %s: no trace was made", self._prompt.request.request_id)

    def _make(self, failed: str) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        request, context, stages = self._prompt.request, self._prompt.context, self._prompt.stages
        now, epoch = time.monotonic(), time.time_ns() - time.monotonic_ns()

        def ns(monotonic_s: float) -> int:
            return epoch + int(1e9 * monotonic_s)

        root = self._tracer.start_span(
            "prompt",
            Context(),
            SpanKind.SERVER,
            {
                "crosskv.request_id": self._request_id,
                "crosskv.tenant": request.tenant,
                "crosskv.fidelity": request.fidelity,
                "crosskv.prompt_tokens": len(request.prompt_token_ids),
                "crosskv.sampled_tokens": self._sampled,
                **_reuse(stages.usage),
            },
            links=list(_links(context.traceparent)),
            start_time=ns(context.arrived),
        )
        if failed:
            root.set_status(Status(StatusCode.ERROR, failed))
        inside = set_span_in_context(root, Context())
        at = context.arrived
        for name, began, ended, tokens in _laps(stages, context, self._first_at, now):
            at = max(at, ended)
            attributes = {"crosskv.tokens": tokens} if tokens is not None else None
            self._tracer.start_span(name, inside, attributes=attributes, start_time=ns(began)).end(ns(ended))
        root.end(ns(max(at, now)))


def open_traces(endpoint: str) -> Traces:
    """Traces that go to an OTLP endpoint over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))


def _laps(
    stages: RequestStages, context: RequestContext, first_at: float, now: float
) -> Iterator[tuple[str, float, float, int | None]]:
    """Name, begin and end on `time.monotonic`'s clock, and tokens.

    One begins where the one before ended. A load is a span for each tier that gave something: the tiers' shares of its
    time are not known apart. One that came layer by layer took its time within the prefill. What is not streamed comes
    with its last token: then all behind the first one is `decode`.
    """
    seconds = {stage: spent for stage, spent in stages.seconds.items() if stage != ANSWER}
    at = context.arrived
    for name, parts in SPANS.items():
        known = [seconds[part] for part in parts if part in seconds]
        spent = sum(known)
        if name == "load":
            within = spent or seconds.get("step", 0.0)
            for tier in _TIERS:
                if tokens := _tokens(stages.usage, tier):
                    yield f"load {tier}", at, at + within, tokens
        elif known:
            yield ("decode" if name == "return" and not context.streams else name), at, at + spent, None
        at += spent
    if first_at and context.streams:
        yield "decode", first_at, now, None


def _reuse(usage: KVCacheUsage | None) -> dict[str, Any]:
    if usage is None:
        return {}
    tokens = {f"crosskv.tokens.{source}": _tokens(usage, source) for source in ("device", *_TIERS, "recomputed")}
    return {**tokens, "crosskv.replica": usage["replica"], "crosskv.reason": usage.get("reason", "")}


def _tokens(usage: KVCacheUsage | None, source: str) -> int:
    return int(cast(Any, usage or {}).get(source, 0))


def _links(traceparent: str) -> Iterator[Any]:
    """To the client's span; nothing for a header that is none."""
    if traceparent:
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        found = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
        theirs = get_current_span(found).get_span_context()
        if theirs.is_valid:
            yield Link(theirs)
