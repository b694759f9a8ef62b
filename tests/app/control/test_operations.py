"""Control API, health and metrics."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from fastapi import FastAPI
from ingress_server import CHAT, COMPLETION, FINGERPRINT, SECRET
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from app.backend import health
from app.backend.protocols import HealthReport
from app.metrics import parts as metrics
from app.metrics.ingress import IngressMetrics
from deployments.protocol.families import Families, labelled
from kvmanager.segments import keys


def test_lookup_hashes_what_a_completion_would_send(start):
    control, replicas = FakeControl(), FakeReplicas()
    server = start(behind=backend(replicas, control))
    text = "The red ball belongs to Anna. " * 20
    with server.http() as client:
        assert client.post("/v1/completions", json={**COMPLETION, "prompt": text}).status_code == 200
        found = client.get("/api/v1/kv/lookup", params={"text": text}).json()
    (request,) = replicas.requests
    assert control.looked_up == [request.block_hashes]
    assert found["tokens"] == len(request.prompt_token_ids)
    assert found["block_size_tokens"] == 32
    assert found["blocks"] == len(request.block_hashes) > 0


def test_lookup_says_in_tokens_what_lies_where(start):
    server = start(behind=backend(FakeReplicas(), FakeControl()))
    with server.http() as client:
        found = client.get("/api/v1/kv/lookup", params={"tokens": ",".join(map(str, range(100)))}).json()
    assert found["tokens_by_tier"] == {"device": {"0": 96, "1": 0}, "cpu": 32, "redis": 64, "redis_with_sparse": 96}
    assert (found["device"], found["cpu"], found["redis"]) == ({"0": 3, "1": 0}, 1, 2)
    assert [(segment["start_token"], segment["end_token"]) for segment in found["segments"]] == [(0, 96), (256, 384)]
    assert (found["segments"][1]["tiers"], found["segments"][1]["sparse"]) == (["cpu"], False)
    assert found["redis_with_sparse"] == 3
    assert not {"redis_in_any_form", "has_other_form"} & {*found, *found["segments"][0]}, "the brain's own words"


@pytest.mark.parametrize(("tokens", "most_blocks"), [(96, 2), (97, 3), (5, 0)])
def test_lookup_of_a_model_with_states_says_where_it_can_be_resumed(fresh, monkeypatch, tokens, most_blocks):
    monkeypatch.setattr("app.ingress.keeps_states", lambda config: True)
    control = FakeControl()
    server = fresh(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        found = client.get("/api/v1/kv/lookup", params={"tokens": ",".join(map(str, range(tokens)))}).json()
    assert control.most_blocks == most_blocks, "a token is left to compute"
    assert (found["landing"], found["landing_token"]) == (1, 32)
    landings = [segment["landings"] for segment in found["segments"]]
    assert landings == [[{"end": 1, "end_token": 32, "tiers": ["cpu"]}], []]


def test_lookup_of_a_model_without_states_has_the_words_it_always_had(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        found = client.get("/api/v1/kv/lookup", params={"tokens": "1,2"}).json()
    assert control.most_blocks is None
    assert list(found) == [
        "tokens", "block_size_tokens", "blocks", "device", "cpu", "redis", "redis_with_sparse", "segments",
        "tokens_by_tier",
    ]  # fmt: skip
    assert list(found["segments"][0]) == [
        "key", "start", "num_blocks", "end", "tiers", "sparse", "kind", "uses", "start_token", "end_token",
    ]  # fmt: skip


def test_lookup_hashes_what_a_chat_would_send(start):
    control, replicas = FakeControl(), FakeReplicas()
    server = start(behind=backend(replicas, control))
    messages = [{"role": "user", "content": "The red ball belongs to Anna. " * 20}]
    with server.http() as client:
        assert client.post("/v1/chat/completions", json={**CHAT, "messages": messages}).status_code == 200
        assert client.get("/api/v1/kv/lookup", params={"messages": json.dumps(messages)}).status_code == 200
        assert client.get("/api/v1/kv/lookup", params={"messages": json.dumps(messages), "cache_salt": "x"}).is_success
    assert control.looked_up[0] == replicas.requests[0].block_hashes
    assert control.looked_up[1][0] != replicas.requests[0].block_hashes[0]


def test_lookup_takes_token_ids(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        client.get("/api/v1/kv/lookup", params={"tokens": ",".join(map(str, range(70)))})
    assert control.looked_up == [keys.block_hashes(range(70), 32, keys.cache_salt(SECRET, FINGERPRINT, "\0"))]


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"text": "a", "tokens": "1"},
        {"tokens": ""},
        {"tokens": "1,x"},
        {"tokens": "-1"},
        {"tokens": "9" * 50},
        {"text": ""},
        {"messages": "{"},
        {"messages": "5"},
        {"messages": "[{}]"},
        {"text": "a", "cache_salt": "a/b"},
        {"text": "x " * 2000},
    ],
    ids=lambda query: str(query)[:40],
)
def test_a_bad_lookup_is_400(server, query: dict[str, str]):
    with server.http() as client:
        answer = client.get("/api/v1/kv/lookup", params=query)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["lookup?tokens=1&fidelty=tolerant", "trie?rot=ab", "stats?tier=cpu"])
def test_a_parameter_that_would_be_ignored_is_400_and_named(server, path: str):
    with server.http() as client:
        answer = client.get(f"/api/v1/kv/{path}")
    wrong = path.rpartition("?")[2].rpartition("&")[2].partition("=")[0]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, wrong)


def test_clear_and_stats_reach_the_manager(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        assert client.post("/api/v1/kv/clear", json={"tiers": ["device", "cpu"]}).json() == {
            "cleared": ["device", "cpu"]
        }
        for tiers in (["redis"], ["cpu", "redis", "cpu"]):
            assert client.post("/api/v1/kv/clear", json={"tiers": tiers}).status_code == 200
        assert client.get("/api/v1/kv/stats").json() == {"nodes": 3}
        for wrong in ({}, {"tiers": []}, {"tiers": ["tape"]}, {"tiers": "cpu"}, {"tiers": ["cpu"], "extra": 1}, []):
            assert client.post("/api/v1/kv/clear", json=wrong).status_code == 400
    assert control.cleared == [["device", "cpu"], ["redis"], ["cpu", "redis"]]


def test_a_manager_that_does_not_answer_is_503_and_disturbs_no_request(start):
    server = start(behind=backend(FakeReplicas(), FakeControl(error=RuntimeError("gone"))))
    with server.http() as client:
        for method, path, body in [
            ("GET", "/api/v1/kv/stats", None),
            ("GET", "/api/v1/kv/lookup?tokens=1", None),
            ("POST", "/api/v1/kv/clear", {"tiers": ["cpu"]}),
        ]:
            answer = client.request(method, path, json=body)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert "gone" not in answer.text
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


async def degraded() -> HealthReport:
    return HealthReport(True, {"replicas": {"state": "ok"}, "cpu_tier": {"state": "missing"}})


async def without_redis() -> HealthReport:
    return HealthReport(True, {"replicas": {"state": "ok"}, "redis": {"state": "Redis is gone", "segments": 0}})


async def down() -> HealthReport:
    return HealthReport(False, {"replicas": {"state": "2 of 2 missing"}})


async def broken() -> HealthReport:
    raise RuntimeError("no manager")


async def hanging() -> HealthReport:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("probe", "code", "status"),
    [
        (degraded, 200, "degraded"),
        (without_redis, 200, "degraded"),
        (down, 503, "unavailable"),
        (broken, 503, "unavailable"),
        (hanging, 503, "unavailable"),
    ],
)
def test_health_says_whether_requests_can_be_served(start, monkeypatch, probe, code: int, status: str):
    monkeypatch.setattr(health, "TIMEOUT_S", 0.2)
    server = start(behind=backend(FakeReplicas(), health=probe))
    with server.http() as client:
        answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (code, status)


def test_health_names_the_scenario_where_there_is_one(start):
    for scenario in (None, "rag"):
        with start(scenario=scenario).http() as client:
            assert client.get("/health").json().get("scenario") == scenario


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_metrics_count_requests_tokens_and_times(start):
    server = start()
    with server.http() as client:
        prompt = client.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]
        client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        client.post("/v1/chat/completions", json={**CHAT, "max_tokens": -1})
        client.get("/nowhere/at/all")
        found = samples(client.get("/metrics").text)
    assert found["crosskv_requests_total{path=/v1/chat/completions,status=200}"] == 2
    assert found["crosskv_requests_total{path=/v1/chat/completions,status=400}"] == 1
    assert found["crosskv_requests_total{path=other,status=404}"] == 1
    assert found["crosskv_prompt_tokens_total{source=device}"] == 2
    assert found["crosskv_prompt_tokens_total{source=recomputed}"] == 2 * (prompt - 1)
    assert found["crosskv_prompt_tokens_total{source=redis}"] == 0
    assert found["crosskv_generated_tokens_total{}"] == 6
    assert found["crosskv_time_to_first_token_seconds_count{}"] == 1
    assert found["crosskv_queue_seconds_count{}"] == 2
    assert found["crosskv_prompts_ongoing{}"] == 0


def test_metrics_join_what_the_parts_give_in_time(fresh, monkeypatch):
    monkeypatch.setattr(metrics, "SOURCE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(metrics, "MAX_AGE_S", 60.0)  # "at once" is sooner, on any machine

    async def engine() -> list[Metric]:
        return [GaugeMetricFamily("vllm:requests", "Requests.", value=5)]

    async def gone() -> list[Metric]:
        raise RuntimeError("gone")

    server = fresh(behind=backend(FakeReplicas(), metrics=lambda: [gone, engine, hanging]))  # type: ignore[list-item]
    with server.http() as client:
        found = samples(client.get("/metrics").text)
        again = samples(client.get("/metrics").text)
    assert found["vllm:requests{}"] == 5
    assert again["crosskv_metrics_sources_missing_total{}"] == 2, "they are not asked again at once"


def test_a_metric_that_several_replicas_have_is_described_once() -> None:
    of_all = [labelled([CounterMetricFamily("x", "Things.", value=1)], replica=str(rank)) for rank in range(2)]
    registry = CollectorRegistry()
    registry.register(Families([GaugeMetricFamily("a", "A.", value=2), *of_all[0], *of_all[1]]))

    text = generate_latest(registry).decode()

    assert text.count("# TYPE x_total counter") == 1
    assert text.splitlines()[-2:] == ['x_total{replica="0"} 1.0', 'x_total{replica="1"} 1.0']
    assert [family.name for family in text_string_to_metric_families(text)] == ["a", "x"]


def test_a_scrape_may_want_the_figures_of_now():
    asked = [0]

    async def source() -> list[Metric]:
        asked[0] += 1
        return [GaugeMetricFamily("asked", "How often.", value=asked[0])]

    registry, app = IngressMetrics(CollectorRegistry()), FastAPI()
    app.include_router(
        metrics.metrics_router(registry, metrics.PartsMetrics(registry, lambda: [source], lambda: 100.0))
    )
    with TestClient(app) as client:
        shown = [client.get("/metrics", headers=headers).text for headers in ({}, {"Cache-Control": "No-Cache"}, {})]
    assert [text.split("\nasked ")[1].split("\n")[0] for text in shown] == ["1.0", "2.0", "2.0"]


def test_a_loop_of_scrapes_asks_the_parts_once_a_second_and_those_at_once_share_the_answer():
    async def scenario() -> None:
        now, asked, answer = [100.0], [0], asyncio.Event()

        async def source() -> list[Metric]:
            asked[0] += 1
            await answer.wait()
            return [Metric(f"parts_{asked[0]}", "", "gauge")]

        async def names() -> list[str]:
            return [family.name for family in await parts.families()]

        parts = metrics.PartsMetrics(IngressMetrics(CollectorRegistry()), lambda: [source], lambda: now[0])
        several = [asyncio.create_task(names()) for _ in range(20)]
        await asyncio.sleep(0)
        several.pop().cancel()  # one goes away; the others get their answer
        answer.set()
        assert await asyncio.gather(*several) == [["parts_1"]] * 19
        now[0] += 0.99
        assert await names() == ["parts_1"]
        assert asked == [1]
        now[0] += 0.02
        assert await names() == ["parts_2"]
        assert [family.name for family in await parts.families(fresh=True)] == ["parts_3"]

    asyncio.run(scenario())


def test_figures_of_now_are_asked_for_after_they_were_wanted_and_a_loop_costs_ten_a_second(monkeypatch):
    async def scenario() -> None:
        asked, answers, pauses = [0], [asyncio.Event() for _ in range(3)], list[float]()
        sleep = asyncio.sleep

        async def noted(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        async def source() -> list[Metric]:
            number, asked[0] = asked[0], asked[0] + 1
            await answers[number].wait()
            return [Metric(f"parts_{number}", "", "gauge")]

        async def names() -> list[str]:
            return [family.name for family in await parts.families(fresh=True)]

        parts = metrics.PartsMetrics(IngressMetrics(CollectorRegistry()), lambda: [source], lambda: 100.0)
        monkeypatch.setattr(metrics.asyncio, "sleep", noted)
        first = asyncio.create_task(names())
        while not asked[0]:
            await sleep(0)
        later = [asyncio.create_task(names()) for _ in range(20)]  # the first one's figures are older than these
        await sleep(0)
        for answer in answers:
            answer.set()
        assert await first == ["parts_0"]
        assert await asyncio.gather(*later) == [["parts_1"]] * 20
        assert asked == [2]
        assert pauses == [0.0, pytest.approx(metrics.LEAST_AGE_S)]

    asyncio.run(scenario())
