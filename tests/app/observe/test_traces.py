"""A prompt's trace: spans made of its stages, the client's own trace as a link, no text; off unless wanted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from failed_replicas import check_all_is_free
from fake_backend import FakeReplicas, backend, fail_with, say, speak_for_ever
from ingress_server import CHAT, COMPLETION, Server, serve, wait_until
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput

import app.ingress
from app.observe.traces import Trace, Traces
from configs.settings import SettingsError, load_settings
from deployments.protocol.stage_stamps import STAGE_STAMPS, StageStamps, this_clock
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest

STREAM = CHAT | {"stream": True}
ENDPOINT = "http://127.0.0.1:4318/v1/traces"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LOAD_S, STEP_S = 0.5, 0.25


async def loaded(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """Two outputs of a replica that loaded from both tiers and then computed."""
    now = time.monotonic()
    request.progress.routed = now - LOAD_S - STEP_S
    yield say(request, [10], " one", finished=False)
    last = say(request, [11], " two", finished=True)
    began = now - LOAD_S - STEP_S
    stamps = StageStamps(this_clock(), began, began, began, began + LOAD_S, began + LOAD_S, now, now)
    size = len(request.prompt_token_ids)
    usage = {"device": 1, "cpu": 2, "redis": 3, "recomputed": size - 6, "replica": "1", "reason": "loaded"}
    last.kv_transfer_params = {KV_CACHE_USAGE: usage, STAGE_STAMPS: stamps}
    yield last


class Traced:
    """A server whose spans stay in memory."""

    def __init__(self, server: Server, exporter: InMemorySpanExporter, traces: Traces) -> None:
        self.server, self._exporter, self._traces = server, exporter, traces

    def begin(self, replicas: FakeReplicas) -> None:
        """Forget the spans of earlier prompts, which have all ended."""
        self._traces._provider.force_flush()
        self._exporter.clear()
        self.server.replicas.script = replicas.script

    def spans(self, prompts: int = 1) -> tuple[ReadableSpan, ...]:
        """Of so many prompts, when they have ended."""

        def ended() -> bool:
            self._traces._provider.force_flush()
            return sum(span.name == "prompt" for span in self._exporter.get_finished_spans()) >= prompts

        wait_until(ended)
        return self._exporter.get_finished_spans()


@pytest.fixture(scope="module")
def server_of_all(vllm_config: VllmConfig) -> Iterator[Traced]:
    exporter, opened = InMemorySpanExporter(), list[Traces]()

    def open_traces(endpoint: str) -> Traces:
        assert endpoint == ENDPOINT
        opened.append(Traces(exporter))
        return opened[0]

    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app.ingress, "open_traces", open_traces)
            server = stack.enter_context(serve(vllm_config, backend(FakeReplicas()), otlp_endpoint=ENDPOINT))
        yield Traced(server, exporter, opened[0])


@pytest.fixture
def traced(server_of_all: Traced) -> Iterator[Callable[..., Traced]]:
    """Takes the server that is traced; its prompts have left their traces when the test is over."""

    def starter(replicas: FakeReplicas | None = None) -> Traced:
        server_of_all.begin(replicas or FakeReplicas())
        return server_of_all

    yield starter
    check_all_is_free(server_of_all.server)


def ask(server: Server, body: dict[str, Any], **headers: str) -> int:
    with server.http(headers={name.replace("_", "-"): value for name, value in headers.items()}) as http:
        return http.post("/v1/chat/completions", json=body).status_code


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def by_name(spans: tuple[ReadableSpan, ...]) -> dict[str, ReadableSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
def test_a_prompts_spans_are_its_stages(traced, body: dict[str, Any]) -> None:
    running = traced(FakeReplicas(script=loaded))
    assert ask(running.server, body, x_request_id="order-66") == 200
    spans = by_name(running.spans())
    expected = {"prompt", "parse", "render", "admit", "route", "plan", "queue", "load cpu", "load redis", "prefill"}
    assert set(spans) == expected | ({"return", "decode"} if body is STREAM else {"decode"})
    assert seconds(spans["prefill"]) == pytest.approx(STEP_S, abs=1e-6)
    assert seconds(spans["load cpu"]) == pytest.approx(LOAD_S, abs=1e-6)
    assert spans["load cpu"].attributes == {"crosskv.tokens": 2}
    assert spans["load redis"].attributes == {"crosskv.tokens": 3}
    root = spans.pop("prompt")
    assert root.attributes is not None
    assert root.attributes["crosskv.request_id"] == "order-66"
    assert root.attributes["crosskv.tokens.redis"] == 3
    assert root.attributes["crosskv.replica"] == "1"
    assert root.attributes["crosskv.sampled_tokens"] == 2
    assert root.status.status_code is not StatusCode.ERROR
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time


def test_no_text_is_in_a_trace(traced) -> None:
    running = traced()
    body = {**STREAM, "user": "somebody", "messages": [{"role": "user", "content": "Zanzibar"}]}
    ask(running.server, body)
    text = " ".join(span.to_json() for span in running.spans())
    for word in ("Zanzibar", "somebody", "one two"):
        assert word not in text


def test_the_clients_trace_is_a_link_and_nothing_more(traced) -> None:
    running = traced()
    ask(running.server, CHAT, traceparent=PARENT)
    root = by_name(running.spans())["prompt"]
    (link,) = root.links
    assert f"{link.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{link.context.span_id:016x}" == PARENT.split("-")[2]
    assert root.parent is None
    assert root.context.trace_id != link.context.trace_id


@pytest.mark.parametrize(
    "value",
    ["", "00-xyz", "ff" + PARENT[2:], PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), "00-" * 900],
)
def test_a_traceparent_that_is_none_is_left_aside(traced, value: str) -> None:
    running = traced()
    assert ask(running.server, CHAT, traceparent=value) == 200
    assert by_name(running.spans())["prompt"].links == ()


def test_a_client_cannot_switch_its_trace_off(traced) -> None:
    running = traced()
    ask(running.server, CHAT, traceparent=PARENT[:-1] + "0")
    assert running.spans()


def test_a_failed_prompt_has_a_trace_that_says_so(traced) -> None:
    running = traced(FakeReplicas(script=fail_with(RuntimeError("a secret of the prompt"))))
    assert ask(running.server, CHAT) >= 500
    root = by_name(running.spans())["prompt"]
    assert root.status.status_code is StatusCode.ERROR
    assert "secret" not in root.to_json()
    assert not root.events


def test_a_client_that_goes_away_leaves_a_trace(traced) -> None:
    running = traced(FakeReplicas(script=speak_for_ever))
    with running.server.http() as http, http.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
        next(answer.iter_lines())
    root = by_name(running.spans())["prompt"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "aborted")


def test_each_prompt_of_a_request_has_a_trace_of_its_own(traced) -> None:
    running = traced()
    with running.server.http() as http:
        assert http.post("/v1/completions", json=COMPLETION | {"prompt": ["One", "Two"]}).status_code == 200
    roots = [span for span in running.spans(2) if span.name == "prompt"]
    assert len({root.context.trace_id for root in roots}) == 2
    assert len({root.attributes["crosskv.request_id"] for root in roots}) == 1


def test_a_defect_in_tracing_costs_nobody_an_answer(traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(Trace, "_make", fail)
    assert ask(traced().server, CHAT) == 200


def test_traces_are_off_by_default(fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(endpoint: str) -> Traces:
        raise AssertionError

    monkeypatch.setattr(app.ingress, "open_traces", fail)
    assert load_settings({}).http.otlp_endpoint is None
    assert ask(fresh(), CHAT) == 200


@pytest.mark.parametrize("value", ["127.0.0.1:4318", "ftp://here/", "http://", "http://a b/"])
def test_an_endpoint_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match=r"http\.otlp_endpoint"):
        load_settings({"http": {"otlp_endpoint": value}})


def test_spans_arrive_at_an_otlp_endpoint(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds; the SDK's own are 5,000
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        server = start(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
        ask(server, CHAT, x_request_id="order-71")
        wait_until(lambda: b"order-71" in b"".join(bodies))  # its spans may come in parts
    finally:
        collector.shutdown()
        collector.server_close()


def test_where_nobody_listens_requests_are_answered_all_the_same(start) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        server = start(otlp_endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/traces")
        assert [ask(server, CHAT) for _ in range(3)] == [200] * 3
