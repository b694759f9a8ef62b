"""GET /api/v1/kv/trie: whose tree, what is asked of the manager, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import SECRET

from app.control.api import MOST_WAITING, QueryLimiter
from app.gate.errors import OverloadedError
from kvmanager.segments.keys import tenant_tag

KEYS = {"key-a": "alice", "key-root": {"tenant": "operator", "admin": True}}


def test_a_tenant_is_shown_its_own_tree_and_an_administrator_that_of_all(start):
    node = {"id": "ab", "parent": None}
    control = FakeControl(tree={"nodes": [node], "hidden": 4})
    server = start(behind=backend(FakeReplicas(), control), api_keys=KEYS)
    with server.http() as client:
        own = client.get("/api/v1/kv/trie", headers={"Authorization": "Bearer key-a"})
        of_all = client.get(
            "/api/v1/kv/trie?root=AB12&depth=2&most=50", headers={"Authorization": "Bearer key-root"}
        ).json()
    assert own.json() == {"object": "crosskv.trie", "root": None, "nodes": [node], "hidden": 4}
    assert of_all["root"] == "ab12"
    assert control.looked_at == [(tenant_tag(SECRET, "alice"), None, 3, 300), (None, b"\xab\x12", 2, 50)]


def test_what_is_not_known_is_404_and_bad_parameters_are_400(start):
    server = start(behind=backend(FakeReplicas(), FakeControl(tree=None)))
    with server.http() as client:
        assert client.get("/api/v1/kv/trie?root=ab").status_code == 404
        for query in ("root=xyz", "root=a", "root=", f"root={'ab' * 65}", "depth=0", "depth=17", "most=0", "most=2001",
                      "most=x"):  # fmt: skip
            answer = client.get(f"/api/v1/kv/trie?{query}")
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), query


def test_a_manager_that_is_away_is_503(start):
    server = start(behind=backend(FakeReplicas(), FakeControl(error=RuntimeError("secret"))))
    with server.http() as client:
        answer = client.get("/api/v1/kv/trie")
    assert answer.status_code == 503
    assert "secret" not in answer.text


def test_looks_reach_the_manager_one_at_a_time_and_of_each_tenant_a_few_wait():
    async def scenario() -> None:
        limiter, under_way, most = QueryLimiter(), 0, 0

        async def look(tenant: str) -> None:
            nonlocal under_way, most
            async with limiter.turn(tenant):
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0)
                under_way -= 1

        tasks = [asyncio.ensure_future(look("alice")) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await look("alice")
        await look("bob")
        await asyncio.gather(*tasks)
        await look("alice")
        assert most == 1

    asyncio.run(scenario())
