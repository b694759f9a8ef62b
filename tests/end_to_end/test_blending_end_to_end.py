"""Documents in an order never seen, in a real server: answered right from their KV, and exact prompts feel nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from app.demo.documents import FACTS
from deployments.replica.chunk_fill import KNOWN_S
from load_tests.harness.running_server import RunningServer, ServerError, started

pytestmark = pytest.mark.server

SETTINGS = {"dtype": "float32", "http": {"debug_headers": True}, "blending": {"fill": "first"}}
_PEOPLE = list(FACTS)
TEXTS = [
    " ".join(sentence for _ in range(4) for name in _PEOPLE[at : at + 5] for sentence in FACTS[name])
    for at in range(0, 30, 5)
]
"""Six documents of some 450 tokens, each about five people."""
QUESTIONS = {
    f"Where does {name} live?": next(fact for fact in FACTS[name] if " lives in " in fact) for name in _PEOPLE[:30:5]
}
"""One about each document, and its answer."""
BLENDED = {"kv_cache": {"fidelity": "blended"}}
MOST_ORDERS = 6
"""The manager blends where measured rates say that it is sooner, which a busy machine may learn late."""


def body(order: Sequence[int], question: str, salt: str, **more: Any) -> dict[str, Any]:
    """A chat whose documents stand in this order."""
    return {
        "model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0,
        "documents": [{"text": TEXTS[number]} for number in order], "cache_salt": salt, **more,
    }  # fmt: skip


def ask(server: RunningServer, asked: dict[str, Any], path: str = "chat/completions") -> tuple[str, dict[str, Any]]:
    """Replica 0's answer and `usage.kv_cache`, when everything that the prompt caused is done."""
    response = httpx.post(f"{server.url}/v1/{path}", json=asked, headers={"X-CrossKV-Replica": "0"}, timeout=60)
    answer = response.raise_for_status().json()
    server.wait_until_idle()
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"]).strip(), answer["usage"][
        "kv_cache"
    ]


def stored_chunks(server: RunningServer, asked: dict[str, Any]) -> list[int]:
    """Of each chunk of a prompt, how many of its tokens a CPU tier has."""
    params = {
        "messages": json.dumps(asked["messages"]),
        "chat": json.dumps({"documents": asked["documents"]}),
        "cache_salt": asked["cache_salt"],
        "fidelity": "blended",
    }
    found = httpx.get(f"{server.url}/api/v1/kv/lookup", params=params, timeout=30).raise_for_status().json()
    return [chunk["tokens_by_tier"]["cpu"] for chunk in found["chunks"]]


def adds_up(usage: dict[str, Any]) -> bool:
    return 0 <= usage["blended"] <= usage["cpu"] + usage["redis"]


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that computes unknown chunks first."""
    with started(tmp_path_factory.mktemp("filling"), SETTINGS) as running:
        yield running


def test_documents_in_another_order_are_answered_from_their_kv(filling: RunningServer) -> None:
    server, salt = filling, "rearranged"
    questions = itertools.cycle(QUESTIONS)
    first = body(range(6), next(questions), salt, **BLENDED)
    answer, usage = ask(server, first)
    assert answer == QUESTIONS[first["messages"][0]["content"]]
    assert (usage["fidelity"], usage["device"]) == ("blended", 0)
    assert adds_up(usage)
    server.wait_until(lambda: min(stored_chunks(server, first)) >= 256, "each document is stored by itself")
    assert len(stored_chunks(server, first)) == 6

    blended = []
    for order in list(itertools.permutations(range(6)))[-1 : -1 - MOST_ORDERS : -1]:
        rearranged = body(order, next(questions), salt, **BLENDED)
        answer, usage = ask(server, rearranged)
        assert answer == QUESTIONS[rearranged["messages"][0]["content"]]
        assert adds_up(usage)
        blended.append(usage["blended"])
        if usage["blended"]:
            break
    assert blended[-1] > 1_000, f"most of the documents: {blended}"
    assert usage["recomputed"] < usage["cpu"] + usage["redis"]
    assert server.metric("crosskv_blended_tokens_total") >= blended[-1]

    exact = {name: value for name, value in rearranged.items() if name != "kv_cache"}
    answer, usage = ask(server, exact)
    assert (usage["device"], usage["cpu"], usage["redis"]) == (0, 0, 0), "nothing blended has an exact name"
    assert "blended" not in usage
    assert answer == QUESTIONS[exact["messages"][0]["content"]]

    alone = {"model": "demo", "prompt": f"<|doc|> {TEXTS[0]}", "max_tokens": 1, "cache_salt": salt}
    _, usage = ask(server, alone, "completions")
    assert usage["device"] + usage["cpu"] + usage["redis"] >= 256, "but the chunk is the exact prompt of it alone"


def test_in_idle_time_documents_are_stored_by_themselves_after_their_prompt_was(server: RunningServer) -> None:
    for order in ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 1, 0, 5, 4, 3)):
        asked = body(order, next(iter(QUESTIONS)), "idle", **BLENDED)
        ask(server, asked)
        with contextlib.suppress(ServerError):  # a busy machine may lose a save, and a later prompt looks again
            server.wait_until(lambda: min(stored_chunks(server, asked)) >= 256, "stored", KNOWN_S + 5)  # noqa: B023
            break
    assert min(stored_chunks(server, asked)) >= 256, "each document is stored by itself"


def test_documents_are_filled_by_order_before_anybody_asks(server: RunningServer) -> None:
    asked = body(range(6), next(iter(QUESTIONS)), "ordered", **BLENDED)
    order = {name: asked[name] for name in ("messages", "documents", "cache_salt")}
    for outcome in ("filled", "stored"):
        answer = httpx.post(f"{server.url}/api/v1/kv/fill", json=order, timeout=30)
        assert answer.status_code == 202, answer.text
        url = server.url + answer.headers["location"]
        server.wait_until(lambda url=url: httpx.get(url).json()["status"] != "running", "the order ends", 60.0)  # type: ignore[misc]
        job = httpx.get(url).json()
        assert (job["status"], job["outcome"], job["done"], job[outcome]) == ("done", "done", 6, 6), job
    assert min(stored_chunks(server, asked)) >= 256, "under the names that blended prompts look for"


def test_documents_that_a_request_names_are_chunks_without_separators(filling: RunningServer) -> None:
    server, salt = filling, "named"
    given = server.metric("crosskv_prompt_chunks_total", outcome="given")
    named = {"kv_cache": {"fidelity": "blended", "chunks": TEXTS, "recompute_ratio": 0.3}}

    def told(order: Sequence[int], question: str) -> dict[str, Any]:
        content = "\n".join(TEXTS[number] for number in order)
        messages = [{"role": "system", "content": content}, {"role": "user", "content": question}]
        return {**body((), question, salt, **named), "messages": messages, "documents": None}

    blended = []
    questions = itertools.cycle(QUESTIONS)
    for order in list(itertools.permutations(range(6)))[: 1 + MOST_ORDERS]:
        question = next(questions)
        answer, usage = ask(server, told(order[::-1], question))
        assert answer == QUESTIONS[question]
        assert adds_up(usage)
        blended.append(usage["blended"])
        if len(blended) > 1 and usage["blended"]:
            break
    assert blended[-1] > 1_000, f"most of the documents: {blended}"
    assert server.metric("crosskv_prompt_chunks_total", outcome="given") - given == 6 * len(blended)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"fidelity": "blended", "recompute_ratio": 1.5}, "kv_cache.recompute_ratio"),
        ({"fidelity": "blended", "chunks": "a text"}, "kv_cache.chunks"),
        ({"fidelity": "exact", "chunks": ["a text"]}, "kv_cache.chunks"),
        ({"recompute_ratio": 0.5}, "kv_cache.recompute_ratio"),
    ],
)
def test_what_cannot_be_blended_is_refused(server: RunningServer, value: Any, param: str) -> None:
    asked = {"model": "demo", "prompt": "Anna lives in Oslo.", "max_tokens": 1, "kv_cache": value}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=30)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
