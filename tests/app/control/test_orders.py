"""Evictions, compression, dry runs, nodes in place of prompts, and the audit log."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import SECRET

from app.control import orders
from kvmanager.segments.keys import tenant_tag
from load_tests.harness.patience import patience

KEYS = {"key-a": "alice", "key-root": {"tenant": "operator", "admin": True}}
TOKENS = {"tokens": list(range(70))}  # two blocks of 32 and some
ALICE, ROOT = ({"Authorization": f"Bearer {key}"} for key in KEYS)
TAG = tenant_tag(SECRET, "alice")


def until_ended(client: Any, url: str) -> dict[str, Any]:
    deadline = time.monotonic() + patience(120)
    while (job := client.get(url).json())["status"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return dict(job)


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "crosskv.audit")
    return lambda: [json.loads(one.getMessage()) for one in caplog.records if one.name == "crosskv.audit"]


def test_an_eviction_is_a_job_and_a_dry_run_says_what_would_go(start):
    control = FakeControl(answer={"cpu": {"segments": 3, "bytes": 9}})
    server = start(behind=backend(FakeReplicas(), control), api_keys=KEYS)
    with server.http(headers=ALICE) as client:
        body = {**TOKENS, "tiers": ["cpu", "device", "cpu"], "replica": 1}
        would = client.post("/api/v1/kv/evict", json={**body, "dry_run": True})
        assert (would.status_code, would.json()) == (200, {"dry_run": True, "would": control.answer})
        answer = client.post("/api/v1/kv/evict", json=body)
        assert answer.status_code == 202
        job = until_ended(client, answer.headers["location"])
    assert (job["kind"], job["status"], job["cpu"]) == ("evict", "done", {"segments": 3, "bytes": 9})
    asked = [order[2:] for order in control.orders]
    assert asked == [(None, TAG, ["cpu", "device"], 1, 10.0, dry) for dry in (True, False)]


def test_what_a_pin_keeps_is_a_failed_job_or_409(start):
    control = FakeControl(answer={"refused": "pinned", "message": "A pin keeps it.", "outcome": "pinned"})
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        body = {**TOKENS, "tiers": ["cpu"]}
        refused = client.post("/api/v1/kv/evict", json={**body, "dry_run": True})
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, "A pin keeps it.")
        job = until_ended(client, client.post("/api/v1/kv/evict", json=body).json()["url"])
    assert (job["status"], job["outcome"], job["message"]) == ("failed", "pinned", "A pin keeps it.")


def test_a_node_stands_for_a_prompt_and_is_looked_for_among_the_callers_own(start):
    control = FakeControl(answer={"segments": 1})
    server = start(behind=backend(FakeReplicas(), control), api_keys=KEYS)
    with server.http() as client:
        for path, more in (("pin", {"ttl_s": 60}), ("unpin", {}), ("evict", {"tiers": ["cpu"], "dry_run": True})):
            for caller in (ALICE, ROOT):
                answer = client.post(f"/api/v1/kv/{path}", json={"node": "AB01", **more}, headers=caller)
                assert answer.status_code == 200, answer.text
    node = b"\xab\x01"
    assert control.orders[:4] == [
        ("pin_node", 2, ttl_s, whose) for ttl_s in (60.0, None) for whose in (TAG, None)
    ]  # fmt: skip
    assert [order[2:4] for order in control.orders[4:]] == [(node, TAG), (node, None)]


def test_dry_runs_of_a_clear_and_a_move_change_nothing(start, audit):
    control = FakeControl(answer={"cpu": {"segments": 1, "bytes": 2}})
    server = start(behind=backend(FakeReplicas(), control), api_keys=KEYS)
    with server.http(headers=ALICE) as client:
        cleared = client.post("/api/v1/kv/clear", json={"tiers": ["cpu", "device"], "dry_run": True})
        assert cleared.json() == {"dry_run": True, "would": control.answer}
        moved = client.post("/api/v1/kv/move", json={**TOKENS, "source": 0, "target": 1, "dry_run": True})
        assert (moved.status_code, moved.json()) == (200, {"dry_run": True, "would": control.answer})
        control.answer = {"refused": "no_replica", "message": "There is no replica 7."}
        gone = client.post("/api/v1/kv/move", json={**TOKENS, "source": 0, "target": 7, "dry_run": True})
        assert gone.status_code == 404
    assert control.orders[:2] == [("would_clear", 2, TAG), ("would_move", 2, 0, 1)]
    assert control.cleared == []
    assert audit() == [], "nothing was changed"


def test_compression_is_a_job_that_tells_how_far_it_is(start, monkeypatch):
    monkeypatch.setattr(orders, "POLL_S", 0.01)
    states = [{"segments": 4, "stored": n, "waiting": 4 - n, "raw_bytes": 10 * n, "coded_bytes": n} for n in (0, 2, 4)]

    class Redis(FakeControl):
        async def compress(self, hashes: Any) -> dict[str, Any]:
            return dict(states[0])

        async def compressed(self, hashes: Any) -> dict[str, Any]:
            return dict(states.pop(1))

    server = start(behind=backend(FakeReplicas(), Redis()))
    with server.http() as client:
        answer = client.post("/api/v1/kv/compress", json=TOKENS)
        assert (answer.status_code, answer.json()["segments"]) == (202, 4)
        job = until_ended(client, answer.json()["url"])
    assert (job["status"], job["stored"], job["raw_bytes"], job["coded_bytes"]) == ("done", 4, 40, 4)


@pytest.mark.parametrize(
    ("state", "outcome"),
    [({"stored": 1, "waiting": 0}, "refused_full"), ({"stored": 1, "waiting": 3}, "deadline")],
)
def test_what_redis_does_not_take_is_told(start, monkeypatch, state, outcome):
    monkeypatch.setattr(orders, "POLL_S", 0.01)
    control = FakeControl(answer={"segments": 4, "raw_bytes": 1, "coded_bytes": 1, **state})
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        url = client.post("/api/v1/kv/compress", json={**TOKENS, "deadline_s": 0.1}).json()["url"]
        job = until_ended(client, url)
    assert (job["status"], job["outcome"], job["stored"]) == ("failed", outcome, 1)


def test_compression_takes_a_jobs_place_before_anything_is_ordered(fresh, audit, monkeypatch):
    monkeypatch.setattr("app.control.jobs.MOST_RUNNING", 1)
    monkeypatch.setattr(orders, "POLL_S", 0.01)
    control = FakeControl(answer={"refused": "unknown_key", "message": "None."})
    server = fresh(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        for _ in range(2):  # one that is refused has its place no more
            assert client.post("/api/v1/kv/compress", json=TOKENS).status_code == 404
        control.error = RuntimeError("away")
        assert client.post("/api/v1/kv/compress", json=TOKENS).status_code == 503
        control.error, control.answer = None, {"segments": 4, "stored": 0, "waiting": 4}
        first = client.post("/api/v1/kv/compress", json=TOKENS).json()["url"]
        refused = client.post("/api/v1/kv/compress", json=TOKENS)
        control.answer = {"segments": 4, "stored": 4, "waiting": 0}
        assert until_ended(client, first)["status"] == "done"
    assert refused.status_code == 429
    assert [kind for kind, *_ in control.orders if kind == "compress"] == ["compress"] * 3, "nothing for the 429"
    said = [(one["what"], one["outcome"], one["blocks"]) for one in audit()]
    outcomes = ["unknown_key", "unknown_key", "UnavailableError", "done"]
    assert said == [("compress", outcome, 2) for outcome in outcomes]


def test_without_redis_there_is_nothing_to_compress_to(start):
    control = FakeControl(answer={"refused": "no_redis", "message": "There is no Redis."})
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        answer = client.post("/api/v1/kv/compress", json=TOKENS)
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, "There is no Redis.")


def test_each_change_is_a_line_that_says_who_what_how_much_and_what_came_of_it(start, audit):
    control = FakeControl(answer={"segments": 3, "bytes": 9})
    server = start(behind=backend(FakeReplicas(), control), api_keys=KEYS)
    with server.http(headers=ALICE) as client:
        client.post("/api/v1/kv/pin", json={**TOKENS, "ttl_s": 60})
        client.post("/api/v1/kv/clear", json={"tiers": ["cpu"]}, headers=ROOT)
        control.answer = {"outcome": "refused_full", "message": "Full."}
        until_ended(client, client.post("/api/v1/kv/prefetch", json={**TOKENS, "replica": 0}).json()["url"])
        control.answer = {"refused": "unknown_key", "message": "None."}
        client.post("/api/v1/kv/unpin", json=TOKENS)
        control.error = RuntimeError("gone")
        client.post("/api/v1/kv/unpin", json=TOKENS)
        client.post("/api/v1/kv/pin", json={"tokens": []})
    found = audit()
    assert [(one["who"], one["admin"], one["what"], one["outcome"]) for one in found] == [
        ("alice", False, "pin", "done"),
        ("operator", True, "clear", "done"),
        ("alice", False, "prefetch", "refused_full"),
        ("alice", False, "unpin", "unknown_key"),
        ("alice", False, "unpin", "UnavailableError"),
    ]
    assert (found[0]["blocks"], found[0]["ttl_s"], found[0]["amount"]) == (2, 60.0, {"segments": 3, "bytes": 9})
    assert found[1]["tiers"] == ["cpu"]
    assert all("tokens" not in one for one in found), "no prompt is in it"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pin", {"node": "xyz"}),
        ("pin", {"node": "abc"}),
        ("pin", {"node": "ab\n"}),
        ("pin", {"node": "ab" * 65}),
        ("pin", {"node": "ab", **TOKENS}),
        ("unpin", {"node": "ab", "tools": []}),
        ("evict", {"node": "ab", "tiers": ["device"]}),
        ("evict", TOKENS),
        ("evict", {**TOKENS, "tiers": []}),
        ("evict", {**TOKENS, "tiers": ["tape"]}),
        ("evict", {**TOKENS, "tiers": ["cpu"], "replica": -1}),
        ("evict", {"tokens": [1], "tiers": ["cpu"]}),
        ("compress", {}),
        ("compress", {**TOKENS, "deadline_s": 0}),
        ("compress", {**TOKENS, "node": "ab"}),
        ("clear", {"tiers": ["cpu"], "dry_run": "maybe"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_order_is_400_and_is_not_carried_out(start, path, body):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        answer = client.post(f"/api/v1/kv/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert (control.orders, control.cleared) == ([], [])
