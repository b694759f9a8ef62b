"""A real server seen and steered: its tree, its live figures, an order to Redis, and an eviction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

DOCUMENT = " ".join(f"Carla keeps bees. Note {number} of the beekeeper." for number in range(40))
PROMPT = {"text": DOCUMENT, "cache_salt": "seen-and-steered"}


def post(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=patience(60))
    assert answer.is_success, answer.text
    return dict(answer.json())


def job(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = post(server, f"/api/v1/kv/{path}", body)["url"]

    def ended() -> bool:
        return httpx.get(f"{server.url}{url}", timeout=patience(60)).json()["status"] != "running"

    server.wait_until(ended, f"{path} has ended")
    return dict(httpx.get(f"{server.url}{url}", timeout=patience(60)).json())


def events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_what_a_prompt_does_is_seen_and_steered(server: RunningServer) -> None:
    with httpx.stream("GET", f"{server.url}/api/v1/events", timeout=patience(60)) as stream:
        told = events(stream)
        first = next(said for name, said in told if name == "cache" and said["manager"] == "ok")
        assert first["tiers"]["cpu"]["budget_bytes"] > 0
        body = {"model": "demo", "prompt": DOCUMENT, "max_tokens": 2, "cache_salt": PROMPT["cache_salt"]}
        answer = post(server, "/v1/completions", body)
        route = next(said for name, said in told if name == "route" and said["answer_id"] == answer["id"])
    usage = answer["usage"]["kv_cache"]
    assert {name: usage[name] for name in ("device", "cpu", "redis", "recomputed")}.items() <= route["tokens"].items()
    assert (route["replica"], route["reason"]) == (usage["replica"], usage["reason"])

    lookup = {"text": DOCUMENT, "cache_salt": PROMPT["cache_salt"]}

    def where() -> dict[str, Any]:
        return dict(httpx.get(f"{server.url}/api/v1/kv/lookup", params=lookup, timeout=patience(60)).json())

    def is_told() -> bool:
        told = where()
        return bool(told["blocks"] == told["cpu"] == told["device"][usage["replica"]])

    server.wait_until(is_told, "the manager knows that the prompt is in the CPU tier and on its device")
    found = where()
    tree = httpx.get(f"{server.url}/api/v1/kv/trie", params={"most": 2000, "depth": 16}, timeout=patience(60)).json()
    nodes = {node["id"]: node for node in tree["nodes"]}
    for segment in found["segments"]:
        node = nodes[segment["key"]]
        assert (node["kind"], node["tokens"]) == (segment["kind"], 32 * segment["num_blocks"])
        assert node["tiers"]["cpu"] > 0
        assert int(usage["replica"]) in node["tiers"]["device"]

    compressed = job(server, "compress", PROMPT)
    assert compressed["outcome"] == "done", compressed
    assert compressed["stored"] == compressed["segments"] > 0
    assert compressed["coded_bytes"] > 0
    assert compressed["raw_bytes"] > 0
    assert where()["redis"] == found["blocks"]

    evict = {**PROMPT, "tiers": ["cpu", "device"]}
    would = post(server, "/api/v1/kv/evict", {**evict, "dry_run": True})["would"]
    assert would["cpu"]["segments"] > 0
    assert where()["cpu"] == found["blocks"], "nothing was changed"
    evicted = job(server, "evict", evict)
    assert (evicted["outcome"], evicted["cpu"]) == ("done", would["cpu"])
    server.wait_until(lambda: not any(where()["device"].values()), "no device has it")
    assert (where()["cpu"], where()["redis"]) == (0, found["blocks"])
