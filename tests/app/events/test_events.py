"""GET /api/v1/events over HTTP: figures, routes, directives, scopes, and a manager that is away."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_backend import FakeControl, FakeReplicas, backend, live_figures
from ingress_server import CHAT, wait_until

from app.events import feed, watchers
from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE

KEYS = {"key-a": "alice", "key-b": "bob", "key-root": {"tenant": "operator", "admin": True}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.05)


def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    """The events of a stream as they come; comments are passed over."""
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def first(found: Iterator[tuple[str, Any]], name: str, where: Any = lambda said: True) -> Any:
    return next(said for told, said in found if told == name and where(said))


def test_the_stream_tells_figures_and_where_prompts_were_sent(fresh):
    server = fresh(behind=backend(FakeReplicas(), FakeControl()))
    with server.http() as client, client.stream("GET", "/api/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        found = events(answer)
        figures = first(found, "cache")
        assert (figures["manager"], figures["prompts"]) == ("ok", 0)
        assert (figures["tiers"]["cpu"]["used_bytes"], figures["tiers"]["cpu"]["budget_bytes"]) == (20, 100)
        assert [one["replica"] for one in figures["replicas"]] == ["0"]
        assert figures["replicas"][0]["used_bytes"] > 0
        with server.http() as other:
            told = other.post("/v1/chat/completions", json=CHAT).json()
        route = first(found, "route")
        assert route["answer_id"] == told["id"]
        assert (route["replica"], route["fidelity"]) == ("0", "exact")
        prompt = told["usage"]["prompt_tokens"]
        assert route["prompt_tokens"] == sum(route["tokens"].values()) == prompt
        after = first(found, "cache", lambda said: said["prompts"] == 1)
        assert after["hit_tokens"]["device"] == 1
        assert after["tiers"]["device"]["hit_rate"] == pytest.approx(1 / prompt, abs=1e-4)


def test_a_tenant_is_told_of_nothing_that_is_anothers(fresh):
    control = FakeControl()
    asked: list[tuple[int, tuple[str, ...]]] = []

    def figures(seen: int, tenants: Any) -> dict[str, Any]:
        asked.append((seen, tuple(tenants)))
        order = {"number": 1, "kind": "evict", "source": ("cpu", "node"), "target": None, "segments": 3}
        return {**live_figures(seen, tenants), "last": 1, "directives": [order] if seen < 1 else []}

    control.alive = figures
    server = fresh(behind=backend(FakeReplicas(), control), api_keys=KEYS)
    with server.http(headers=bearer("key-a")) as client, client.stream("GET", "/api/v1/events") as answer:
        found = events(answer)
        assert first(found, "cache")["queue"] == {"ongoing": 0, "waiting": 0}
        with server.http() as other:
            assert other.post("/v1/chat/completions", json=CHAT, headers=bearer("key-b")).is_success
            assert other.post("/v1/chat/completions", json=CHAT, headers=bearer("key-a")).is_success
        seen = []
        for name, said in found:
            seen.append((name, said))
            if name == "cache" and said["prompts"]:
                break
    assert {name for name, _ in seen} == {"cache", "route"}, "directives are for administrators"
    routes = [said for name, said in seen if name == "route"]
    assert len(routes) == 1, "bob's prompt is not alice's to see"
    assert "tenant" not in routes[0]
    last = seen[-1][1]
    assert (last["prompts"], last["replicas"], last["index"]) == (1, [], None)
    assert last["tiers"]["cpu"]["used_bytes"] == 10
    assert "budget_bytes" not in last["tiers"]["device"]
    assert all(len(tenants) == 1 for _, tenants in asked)


def test_an_administrator_is_told_of_all_and_of_each_directive_once(fresh):
    control = FakeControl()

    def figures(seen: int, tenants: Any) -> dict[str, Any]:
        order = {"number": 7, "kind": "demote", "source": ("cpu", "a" * 56), "target": ("redis", ""), "segments": 3}
        return {**live_figures(seen, tenants), "last": 7, "directives": [order] if seen < 7 else []}

    control.alive = figures
    server = fresh(behind=backend(FakeReplicas(), control), api_keys=KEYS)
    with server.http(headers=bearer("key-root")) as client, client.stream("GET", "/api/v1/events") as answer:
        found = events(answer)
        told = first(found, "directive")
        assert (told["kind"], told["segments"]) == ("demote", 3)
        assert (told["source"], told["target"]) == ({"tier": "cpu", "holder": "a" * 8}, {"tier": "redis", "holder": ""})
        with server.http() as other:
            assert other.post("/v1/chat/completions", json=CHAT, headers=bearer("key-b")).is_success
        seen = []
        for name, said in found:
            seen.append(name)
            if name == "route":
                assert said["tenant"] == "bob"
                break
    assert "directive" not in seen


def test_it_goes_on_without_the_manager_and_says_so(fresh):
    control = FakeControl(error=RuntimeError("gone"))
    server = fresh(behind=backend(FakeReplicas(), control))
    with server.http() as client, client.stream("GET", "/api/v1/events") as answer:
        found = events(answer)
        away = first(found, "cache")
        assert (away["manager"], away["index"], away["tiers"]["cpu"]["used_bytes"]) == ("away", None, None)
        with server.http() as other:
            assert other.post("/v1/chat/completions", json=CHAT).is_success
        assert first(found, "route")["tokens"]["device"] == 1
        assert first(found, "cache", lambda said: said["prompts"] == 1)["manager"] == "away"
        control.error = None
        assert first(found, "cache", lambda said: said["manager"] == "ok")["prompts"] == 1


def test_a_route_is_told_with_the_first_token_where_the_replica_says_it_then(fresh):
    async def script(request: Any) -> Any:
        from fake_backend import say

        output = say(request, [10], " one", finished=False)
        tokens = len(request.prompt_token_ids)
        told = {"device": 0, "cpu": tokens - 1, "redis": 0, "recomputed": 1, "replica": ""}
        output.kv_transfer_params = {KV_CACHE_USAGE: told}  # as the engine says it, without the reason
        setattr(output, FIRST_USAGE, {**told, "replica": "0", "reason": "hit"})  # and as the replica signs it
        yield output
        await asyncio.to_thread(ended.wait, 60)
        yield say(request, [11], " two", finished=True)

    ended = threading.Event()  # set by the test's thread, whether or not the script has come to wait for it
    server = fresh(FakeReplicas(script))
    with server.http() as client, client.stream("GET", "/api/v1/events") as answer:
        found = events(answer)
        with (
            server.http() as other,
            other.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as chat,
        ):
            route = first(found, "route")
            assert (route["reason"], route["tokens"]["recomputed"]) == ("hit", 1)
            first(found, "cache", lambda said: said["replicas"][0]["ongoing"] == 1)  # an older one may come first
            ended.set()
            assert "[DONE]" in "".join(chat.iter_text())
        counted = 0
        for name, said in found:
            counted += name == "route"
            if name == "cache" and said["prompts"]:
                break
    assert counted == 0, "told once"


def test_who_goes_gives_the_place_back_and_too_many_are_refused(fresh, monkeypatch):
    monkeypatch.setattr(watchers, "MOST_OF_A_TENANT", 1)
    server = fresh()
    with server.http() as client, server.http() as second:
        with client.stream("GET", "/api/v1/events") as answer:
            found = events(answer)  # held: the connection ends with it, and then nobody is refused
            first(found, "cache")
            refused = second.get("/api/v1/events")
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"

        def again() -> bool:
            with second.stream("GET", "/api/v1/events") as one_more:
                return one_more.status_code == 200

        wait_until(again)


def test_a_server_that_is_being_stopped_ends_its_streams_and_begins_none(fresh):
    stopping = threading.Event()
    server = fresh(behind=backend(FakeReplicas(), ending=stopping.is_set))
    with server.http() as client, server.http() as second:
        with client.stream("GET", "/api/v1/events") as answer:
            found = events(answer)
            first(found, "cache")
            stopping.set()
            assert list(found)[-1] == ("restarting", {})
        refused = second.get("/api/v1/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        assert refused.headers["retry-after"]


def test_a_comment_says_that_the_stream_lives_while_nothing_happens(fresh, monkeypatch):
    monkeypatch.setattr(watchers, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(feed, "EVERY_S", 60.0)
    server = fresh()
    with server.http() as client, client.stream("GET", "/api/v1/events") as answer:
        assert any(line == ": nothing new" for line in answer.iter_lines())


def test_strangers_watch_nothing(fresh):
    server = fresh(api_keys=KEYS)
    with server.http() as client:
        assert client.get("/api/v1/events").status_code == 401
    other = fresh()
    with other.http(headers={"via": "1.1 proxy"}) as client:
        assert client.get("/api/v1/events").status_code == 403
        assert client.get("/api/v1/kv/trie").status_code == 403
