"""What a tenant's key, an administrator's, a stranger's request and a probe are shown and allowed, route by route."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CHAT, SECRET, Server, wait_until
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.datastructures import Headers

from app.control import jobs as kv_jobs
from app.gate.auth import from_this_machine, route_path
from app.gate.bound_host import is_loopback
from deployments.protocol.families import labelled
from kvmanager.segments.keys import tenant_tag

KEYS = {"key-a": "alice", "key-b": "bob", "key-o": {"tenant": "ops", "admin": True}}
ALICE, BOB, OPS = ({"authorization": f"Bearer {key}"} for key in KEYS)
TOKENS = {"tokens": list(range(70))}
CLEAR = {"tiers": ["device", "cpu"]}


def refused(answer: Any, status: int) -> str:
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def families() -> list[Metric]:
    return labelled([GaugeMetricFamily("crosskv_tenant_bytes", "Bytes.", value=5)], tenant="alice")


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def keyed(start: Any, control: FakeControl) -> Server:
    behind = backend(FakeReplicas(), control, metrics=lambda: [families])
    return start(behind=behind, scenario="cost", api_keys=KEYS)


def test_a_tenants_clear_is_of_its_own_kv_and_an_administrators_of_all(keyed: Server, control: FakeControl):
    with keyed.http() as client:
        for headers in (ALICE, BOB, OPS):
            assert client.post("/api/v1/kv/clear", json=CLEAR, headers=headers).status_code == 200
    assert control.cleared_of == [tenant_tag(SECRET, "alice"), tenant_tag(SECRET, "bob"), None]


def test_a_tenants_statistics_are_its_own_and_an_administrators_of_all(keyed: Server):
    with keyed.http() as client:
        own = client.get("/api/v1/kv/stats", headers=ALICE).json()
        assert own == {"tenant": "alice", "tag": tenant_tag(SECRET, "alice")}
        assert client.get("/api/v1/kv/stats", headers=OPS).json() == {"nodes": 3}


def test_pins_are_made_and_ended_in_the_tenants_name(keyed: Server, control: FakeControl):
    with keyed.http() as client:
        client.post("/api/v1/kv/pin", json=TOKENS, headers=ALICE)
        client.post("/api/v1/kv/unpin", json=TOKENS, headers=BOB)
    assert [order[-1] for order in control.orders] == [tenant_tag(SECRET, name) for name in ("alice", "bob")]


def test_what_is_about_the_whole_server_is_for_administrators(keyed: Server):
    with keyed.http() as client:
        message = refused(client.get("/api/v1/layerwise/stats", headers=ALICE), 403)
        assert "admin: true" in message
        assert client.get("/api/v1/layerwise/stats", headers=OPS).json() == {"layer_times": []}
        refused(client.get("/api/v1/settings", headers=ALICE), 403)
        assert client.get("/api/v1/settings", headers=OPS).json()["in_effect"]["model"] == "demo"


def test_metrics_need_an_administrators_key_or_their_own(start: Any):
    server = start(
        behind=backend(FakeReplicas(), FakeControl(), metrics=lambda: [families]), api_keys=KEYS, metrics_key="scraper"
    )
    scraper = {"authorization": "Bearer scraper"}
    with server.http() as client:
        assert "alice" not in refused(client.get("/metrics"), 401)
        assert "http.metrics_key" in refused(client.get("/metrics", headers=ALICE), 403)
        refused(client.get("/metrics", headers={"authorization": "Bearer wrong"}), 401)
        refused(client.get("/metrics", headers={"authorization": "Basic scraper"}), 401)
        for headers in (OPS, scraper):
            answer = client.get("/metrics", headers=headers)
            assert answer.status_code == 200
            assert 'crosskv_tenant_bytes{tenant="alice"} 5' in answer.text
        refused(client.get("/v1/models", headers=scraper), 401)
        text = client.get("/metrics", headers=OPS).text
    assert 'crosskv_refused_requests_total{reason="no_key"} 4.0' in text
    assert 'crosskv_refused_requests_total{reason="forbidden"} 1.0' in text


def test_health_tells_a_stranger_whether_it_serves_and_an_administrator_the_parts(keyed: Server):
    with keyed.http() as client:
        for headers in ({}, ALICE, {"authorization": "Bearer wrong"}):
            assert client.get("/health", headers=headers).json() == {"status": "ok"}
        told = client.get("/health", headers=OPS).json()
    assert {"ingress", "replicas"} <= told["parts"].keys()
    assert told["scenario"] == "cost"


def test_who_has_no_key_is_told_the_same_of_every_path(keyed: Server):
    with keyed.http() as client:
        for path in ("/unknown", "/v1/unknown", "/api/v1/kv/clear", "/metrics/", "//metrics", "/health/x"):
            for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE"):
                answer = client.request(method, keyed.url + path)  # else "//metrics" is a host, and "/" its path
                assert answer.status_code == 401, (method, path)


CONTROL = [
    ("GET", "/api/v1/kv/stats", None),
    ("GET", "/api/v1/kv/lookup?tokens=1", None),
    ("POST", "/api/v1/kv/clear", CLEAR),
    ("POST", "/api/v1/kv/pin", TOKENS),
    ("POST", "/api/v1/kv/unpin", TOKENS),
    ("POST", "/api/v1/kv/prefetch", {**TOKENS, "replica": 0}),
    ("POST", "/api/v1/kv/move", {**TOKENS, "source": 0, "target": 1}),
    ("GET", "/api/v1/kv/jobs/job-1", None),
    ("GET", "/api/v1/layerwise/stats", None),
    ("GET", "/api/v1/settings", None),
    ("GET", "/metrics", None),
]


@pytest.mark.parametrize(
    ("loopback", "headers"),
    [
        (False, {}),
        (True, {"x-forwarded-for": "203.0.113.7"}),
        (True, {"forwarded": "for=203.0.113.7"}),
        (True, {"origin": "https://page.example"}),
        (True, {"origin": "null"}),
        (True, {"sec-fetch-site": "cross-site"}),
    ],
    ids=str,
)
def test_without_keys_nobody_but_this_machine_controls_the_server(
    start: Any, control: FakeControl, loopback: bool, headers: dict[str, str]
):
    server = start(behind=backend(FakeReplicas(), control), loopback=loopback)
    with server.http() as client:
        for method, path, body in CONTROL:
            refused(client.request(method, path, json=body, headers=headers), 403)
        assert client.get("/health", headers=headers).json() == {"status": "ok"}
        assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert not control.orders
    assert not control.cleared
    assert not control.looked_up


def test_without_keys_this_machine_controls_the_server(start: Any, control: FakeControl):
    with start(behind=backend(FakeReplicas(), control)).http() as client:
        for method, path, body in CONTROL:
            assert client.request(method, path, json=body).status_code in (200, 202, 404)
        assert client.get("/v1/models", headers={"origin": "http://localhost:3000"}).status_code == 200


def test_a_metrics_key_opens_the_metrics_of_an_open_server(start: Any):
    with start(loopback=False, metrics_key="scraper").http() as client:
        assert client.get("/metrics", headers={"authorization": "Bearer scraper"}).status_code == 200
        refused(client.get("/metrics", headers={"authorization": "Bearer other"}), 403)


@pytest.mark.parametrize(
    ("loopback", "setting", "headers", "obeyed"),
    [
        (True, {}, {}, True),
        (False, {}, {}, False),
        (True, {"api_keys": KEYS}, ALICE, False),
        (True, {"api_keys": KEYS}, OPS, True),
        (False, {"api_keys": KEYS}, OPS, True),
        (False, {"api_keys": KEYS}, ALICE, False),
    ],
)
def test_a_replica_is_chosen_by_header_for_administrators(
    start: Any, loopback: bool, setting: dict[str, Any], headers: dict[str, str], obeyed: bool
):
    with start(loopback=loopback, **setting).http(headers={**headers, "X-CrossKV-Replica": "0"}) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == (200 if obeyed else 400)


def test_a_second_clear_of_a_tenant_waits_for_the_first_and_another_tenants_does_not(start: Any):
    begun, end = asyncio.Event(), asyncio.Event()

    class SlowControl(FakeControl):
        async def clear(self, tiers: Any, tenant: str | None) -> dict[str, Any]:
            begun.set()
            if tenant == tenant_tag(SECRET, "alice"):
                await end.wait()
            return {}

    server = start(behind=backend(FakeReplicas(), SlowControl()), api_keys=KEYS)
    with server.http() as client, ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, "/api/v1/kv/clear", json=CLEAR, headers=ALICE)
        wait_until(begun.is_set)
        refused(client.post("/api/v1/kv/clear", json=CLEAR, headers=ALICE), 429)
        assert client.post("/api/v1/kv/clear", json=CLEAR, headers=BOB).status_code == 200
        end._loop.call_soon_threadsafe(end.set)  # type: ignore[attr-defined]  # of the server's thread
        assert first.result().status_code == 200
        assert client.post("/api/v1/kv/clear", json=CLEAR, headers=ALICE).status_code == 200


def test_one_tenants_jobs_leave_room_for_another_ones(fresh: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_jobs, "MOST_RUNNING", 8)
    server = fresh(behind=backend(FakeReplicas(), FakeControl(obeys=asyncio.Event())), api_keys=KEYS)
    body = {**TOKENS, "replica": 0}
    with server.http() as client:
        statuses = [client.post("/api/v1/kv/prefetch", json=body, headers=ALICE).status_code for _ in range(10)]
        assert statuses.count(202) == 6
        assert client.post("/api/v1/kv/prefetch", json=body, headers=BOB).status_code == 202


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False), ("", False), (None, False), ("10.0.0.1", False),
        ("localhost.example", False), ("127.0.0.1.example", False), ("2130706433", False), ("127.1", False),
    ],
)  # fmt: skip
def test_what_is_loopback(address: str | None, loopback: bool):
    assert is_loopback(address) == loopback


@pytest.mark.parametrize(
    ("client", "headers", "own"),
    [
        (("127.0.0.1", 5), {"host": "127.0.0.1:8000"}, True),
        (("::1", 5), {"host": "[::1]:8000"}, True),
        (("127.0.0.1", 5), {}, False),
        (("127.0.0.1", 5), {"host": "[::1"}, False),
        (("10.0.0.2", 5), {"host": "127.0.0.1:8000"}, False),
        (None, {"host": "127.0.0.1:8000"}, False),
        (("127.0.0.1", 5), {"host": "localhost", "via": "1.1 proxy"}, False),
        (("127.0.0.1", 5), {"host": "localhost", "origin": "http://127.0.0.1:8000"}, True),
        (("127.0.0.1", 5), {"host": "localhost", "origin": "https://page.example"}, False),
        (("127.0.0.1", 5), {"host": "localhost", "origin": "null"}, False),
        (("127.0.0.1", 5), {"host": "localhost@evil.example"}, False),
        (("127.0.0.1", 5), {"host": "localhost", "sec-fetch-site": "same-origin"}, True),
        (("127.0.0.1", 5), {"host": "localhost", "sec-fetch-site": "none"}, True),
        (("127.0.0.1", 5), {"host": "localhost", "sec-fetch-site": "cross-site"}, False),
        (("127.0.0.1", 5), {"host": "localhost", "sec-fetch-site": "cross-site", "origin": "http://127.0.0.1"}, True),
    ],
)
def test_who_works_on_this_machine(client: Any, headers: dict[str, str], own: bool):
    assert from_this_machine({"type": "http", "client": client}, Headers(headers)) == own


def test_paths_are_read_below_the_applications_prefix():
    assert route_path({"type": "http", "path": "/llm/metrics", "root_path": "/llm"}) == "/metrics"
    assert route_path({"type": "http", "path": "/metrics", "root_path": ""}) == "/metrics"
    assert route_path({"type": "http", "path": "/llmetrics", "root_path": "/llm"}) == "/llmetrics"
