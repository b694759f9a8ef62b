"""The control API's orders: pin, unpin, prefetch, move, and the jobs of the last two."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CHAT, SECRET

from kvmanager.segments.keys import tenant_tag
from load_tests.harness.patience import patience

TENANTS = {"key-a": "alice", "key-b": "bob"}
TOKENS = {"tokens": list(range(70))}  # two blocks of 32 and some


def until_ended(client, url):
    deadline = time.monotonic() + patience(120)
    while (job := client.get(url).json())["status"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return job


def test_pin_and_unpin_reach_the_manager_with_the_prompts_blocks(start):
    control = FakeControl(answer={"segments": 1, "bytes": 10})
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        assert client.post("/api/v1/kv/pin", json={**TOKENS, "ttl_s": 60}).json() == {"segments": 1, "bytes": 10}
        assert client.post("/api/v1/kv/pin", json=TOKENS).status_code == 200
        assert client.post("/api/v1/kv/unpin", json=TOKENS).status_code == 200
    assert control.orders == [("pin", 2, 60.0, ""), ("pin", 2, 3600.0, ""), ("unpin", 2, "")]


def test_the_three_forms_of_a_prompt_name_the_same_blocks_as_lookup_does(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    text = "The red ball belongs to Anna. " * 20
    messages = [{"role": "user", "content": text}]
    with server.http() as client:
        for form in ({"text": text}, {"messages": messages}):
            assert client.post("/api/v1/kv/pin", json=form).status_code == 200
        client.get("/api/v1/kv/lookup", params={"text": text})
    assert control.orders[0] == ("pin", len(control.looked_up[0]), 3600.0, "")
    assert control.orders[1][1] > 0


@pytest.mark.parametrize(
    ("refused", "status"), [("unknown_key", 404), ("pin_budget", 409), ("bad_value", 400), ("something_new", 409)]
)
def test_what_the_manager_refuses_is_a_4xx_with_its_sentence(start, refused, status):
    control = FakeControl(answer={"refused": refused, "message": "No such thing."})
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        for path in ("pin", "unpin"):
            answer = client.post(f"/api/v1/kv/{path}", json=TOKENS)
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == "No such thing."


def test_a_prefetch_is_a_job_that_ends(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        answer = client.post("/api/v1/kv/prefetch", json={**TOKENS, "replica": 1})
        assert answer.status_code == 202
        job = until_ended(client, answer.headers["location"])
    assert job["id"] == answer.json()["id"]
    assert (job["kind"], job["status"], job["outcome"], job["blocks"]) == ("prefetch", "done", "done", 2)
    assert control.orders == [("prefetch", 2, 1, 10.0)]


def test_a_job_runs_until_the_manager_has_answered(start):
    obeys = asyncio.Event()
    control = FakeControl(obeys=obeys)
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        body = {**TOKENS, "source": 0, "target": 1, "deadline_s": 5}
        url = client.post("/api/v1/kv/move", json=body).json()["url"]
        assert client.get(url).json()["status"] == "running"
        obeys._loop.call_soon_threadsafe(obeys.set)  # type: ignore[attr-defined]  # of the server's thread
        assert until_ended(client, url)["status"] == "done"
    assert control.orders == [("move", 2, 0, 1, 5.0)]


def test_a_node_is_moved_and_brought_by_its_name_for_its_owner_or_an_administrator(start):
    control = FakeControl()
    keys = {"key-a": "alice", "key-root": {"tenant": "operator", "admin": True}}
    server = start(behind=backend(FakeReplicas(), control), api_keys=keys)
    node = {"node": "AB" * 32}
    with server.http() as client:
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            for path, more in (("move", {"source": 0, "target": 1}), ("prefetch", {"replica": 1})):
                answer = client.post(f"/api/v1/kv/{path}", json={**node, **more}, headers=headers)
                assert answer.status_code == 202, answer.text
                assert client.get(answer.json()["url"], headers=headers).status_code == 200
        dry = client.post("/api/v1/kv/move", json={**node, "source": 0, "target": 1, "dry_run": True}, headers=headers)
        assert dry.json()["dry_run"] is True
    named = [order for order in control.orders if order[0] == "hashes_to"]
    assert named == [("hashes_to", 32, whose) for whose in (tenant_tag(SECRET, "alice"),) * 2 + (None,) * 3]
    assert [order for order in control.orders if order[0] != "hashes_to"] == [
        *[("move", 3, 0, 1, 10.0), ("prefetch", 3, 1, 10.0)] * 2, ("would_move", 3, 0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("refused", "status"), [("unknown_key", 404), ("not_named", 409)])
def test_a_node_that_cannot_be_moved_is_refused_at_once_and_in_words(start, refused, status):
    control = FakeControl(answer={"refused": refused, "message": "There is no such node (any more)."})
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        for path, more in (("move", {"source": 0, "target": 1}), ("prefetch", {"replica": 1})):
            answer = client.post(f"/api/v1/kv/{path}", json={"node": "ab", **more})
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == "There is no such node (any more)."
    assert {order[0] for order in control.orders} == {"hashes_to"}


def test_a_move_that_is_refused_or_unanswered_is_a_failed_job_with_a_sentence(start):
    control = FakeControl(answer={"outcome": "refused_full", "message": "The device pool is full."})
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        job = until_ended(client, client.post("/api/v1/kv/prefetch", json={**TOKENS, "replica": 0}).json()["url"])
        assert (job["status"], job["outcome"], job["message"]) == ("failed", "refused_full", "The device pool is full.")
        control.error = RuntimeError("secret")
        job = until_ended(client, client.post("/api/v1/kv/prefetch", json={**TOKENS, "replica": 0}).json()["url"])
        assert job["status"] == "failed"
        assert "secret" not in str(job)


def test_jobs_belong_to_their_tenant(start):
    server = start(behind=backend(FakeReplicas(), FakeControl()), api_keys=TENANTS)
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in TENANTS)
    with server.http() as client:
        url = client.post("/api/v1/kv/prefetch", json={**TOKENS, "replica": 0}, headers=alice).json()["url"]
        assert client.get(url, headers=alice).status_code == 200
        for other, wrong in ((bob, url), (alice, "/api/v1/kv/jobs/job-0")):
            answer = client.get(wrong, headers=other)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_more_jobs_than_may_run_are_429_and_the_front_goes_on(fresh, monkeypatch):
    monkeypatch.setattr("app.control.jobs.MOST_RUNNING", 1)
    server = fresh(behind=backend(FakeReplicas(), FakeControl(obeys=asyncio.Event())))
    with server.http() as client:
        body = {**TOKENS, "replica": 0}
        assert client.post("/api/v1/kv/prefetch", json=body).status_code == 202
        answer = client.post("/api/v1/kv/prefetch", json=body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_old_jobs_are_forgotten(fresh, monkeypatch):
    monkeypatch.setattr("app.control.jobs.MOST_KEPT", 2)
    server = fresh(behind=backend(FakeReplicas(), FakeControl()))
    with server.http() as client:
        urls = []
        for _ in range(4):
            urls.append(client.post("/api/v1/kv/prefetch", json={**TOKENS, "replica": 0}).json()["url"])
            until_ended(client, urls[-1])
        assert [client.get(url).status_code for url in urls] == [404, 404, 200, 200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pin", {}),
        ("pin", {"text": "a", "tokens": [1]}),
        ("pin", {"tokens": []}),
        ("pin", {"tokens": [1]}),
        ("pin", {"tokens": [-1] * 40}),
        ("pin", {"tokens": ["1"] * 40}),
        ("pin", {"tokens": [True] * 40}),
        ("pin", {"messages": [{}]}),
        ("pin", {**TOKENS, "ttl_s": 0}),
        ("pin", {**TOKENS, "ttl_s": 1e12}),
        ("pin", {**TOKENS, "ttl_s": "inf"}),
        ("pin", {**TOKENS, "extra": 1}),
        ("pin", {**TOKENS, "cache_salt": ""}),
        ("unpin", {**TOKENS, "ttl_s": 1}),
        ("prefetch", TOKENS),
        ("prefetch", {**TOKENS, "replica": -1}),
        ("prefetch", {**TOKENS, "replica": "0"}),
        ("prefetch", {**TOKENS, "replica": 0, "deadline_s": 0}),
        ("move", {**TOKENS, "source": 0}),
        ("move", {**TOKENS, "source": 1, "target": 1}),
        ("move", []),
        ("move", {**TOKENS, "node": "ab", "source": 0, "target": 1}),
        ("move", {"node": "a", "source": 0, "target": 1}),
        ("move", {"node": "ab" * 65, "source": 0, "target": 1}),
        ("prefetch", {**TOKENS, "node": "ab", "replica": 0}),
        ("prefetch", {"node": 5, "replica": 0}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_order_is_400_and_reaches_nobody(start, path, body):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        answer = client.post(f"/api/v1/kv/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert control.orders == []


def test_orders_to_a_manager_that_is_away_are_503(start):
    server = start(behind=backend(FakeReplicas(), FakeControl(error=RuntimeError("gone"))))
    with server.http() as client:
        for path in ("pin", "unpin"):
            answer = client.post(f"/api/v1/kv/{path}", json=TOKENS)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert "gone" not in answer.text
