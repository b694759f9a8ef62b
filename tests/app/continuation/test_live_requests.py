"""The list of live requests, and orders to move one: for administrators, in words when they cannot be obeyed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_backend import FakeReplicas, say, speak
from ingress_server import CHAT, COMPLETION, Server, wait_until

from app.continuation import generated_tokens
from app.continuation.live import answer_id
from deployments.protocol.wire import GenerateRequest
from load_tests.harness.patience import patience

ADMIN, STRANGER = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
KEYS = {"key-a": {"tenant": "one", "admin": True}, "key-b": "two"}


async def stay(request: GenerateRequest) -> AsyncIterator[Any]:
    """At "a" the first word, and then nothing; elsewhere all that is left."""
    async for output in speak(request):
        yield output
        if request.progress.replica == "a":
            await asyncio.Event().wait()


class Streaming:
    """One stream that runs meanwhile."""

    def __init__(self, server: Server, path: str = "/v1/chat/completions", **more: Any) -> None:
        self.begun = threading.Event()
        self.id = ""
        self.text = ""
        self.error = ""
        self._server, self._path = server, path
        self._body = {**(CHAT if "chat" in path else COMPLETION), "stream": True, **more}

    def read(self) -> None:
        with (
            self._server.http() as client,
            client.stream("POST", self._path, json=self._body, headers=ADMIN) as answer,
        ):
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]["message"]
                    continue
                self.id = event["id"]
                for choice in event["choices"]:
                    self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if self.text:
                    self.begun.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def begin(threads: ThreadPoolExecutor, server: Server, *args: Any, **more: Any) -> tuple[Streaming, Any]:
    stream = Streaming(server, *args, **more)
    reading = threads.submit(stream.read)
    assert stream.begun.wait(patience(120))
    return stream, reading


def listed(server: Server) -> list[dict[str, Any]]:
    with server.http() as client:
        answer = client.get("/api/v1/requests", headers=ADMIN)
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["requests"]
    return found


def check_all_is_free(server: Server) -> None:
    def ingress() -> dict[str, Any]:
        with server.http() as client:
            found: dict[str, Any] = client.get("/health", headers=ADMIN).json()["parts"]["ingress"]
        return found

    wait_until(lambda: ingress() == {"state": "ok", "ongoing": 0, "waiting": 0})


def move(server: Server, name: str, headers: dict[str, str] = ADMIN, **body: Any) -> Any:
    with server.http() as client:
        return client.post(f"/api/v1/requests/{name}/move", **{"headers": headers, **body})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("by", ["id", "answer_id"])
def test_a_stream_is_moved_by_its_own_id_and_by_the_one_that_its_client_sees(start, threads, path: str, by: str):
    replicas = FakeReplicas(stay)
    server = start(replicas, api_keys=KEYS)
    stream, reading = begin(threads, server, path)
    (shown,) = listed(server)
    assert shown["answer_id"] == stream.id
    assert (shown["tenant"], shown["replica"], shown["tokens"], shown["streamed"]) == ("one", 0, 1, True)
    assert (shown["not_movable"], shown["resumed"]) == (None, 0)
    answer = move(server, shown[by])
    assert (answer.status_code, answer.json()) == (202, {"id": shown["id"], "source": 0, "target": None, "tokens": 1})
    reading.result(patience(120))
    assert (stream.text, stream.error) == (" one two three", "")
    first, second = replicas.requests
    assert replicas.aborted[0] == first.request_id
    assert (second.resumed_tokens, second.avoid, second.progress.replica) == ([10], ("a",), "b")
    wait_until(lambda: listed(server) == [])
    assert move(server, shown["id"]).status_code == 404
    check_all_is_free(server)


def test_a_stream_goes_on_at_the_replica_that_is_named(start, threads):
    replicas = FakeReplicas(stay)
    server = start(replicas, api_keys=KEYS)
    stream, reading = begin(threads, server)
    (shown,) = listed(server)
    answer = move(server, shown["id"], json={"replica": 2})
    assert (answer.status_code, answer.json()) == (202, {"id": shown["id"], "source": 0, "target": 2, "tokens": 1})
    reading.result(patience(120))
    assert (stream.text, stream.error) == (" one two three", "")
    assert [request.progress.replica for request in replicas.requests] == ["a", "c"]


NO_TARGETS: list[tuple[dict[str, Any], int, str]] = [
    ({"json": {"replica": 3}}, 404, "There is no replica 3."),
    ({"json": {"replica": 0}}, 409, "there already"),
    ({"json": {"replica": 1}}, 409, "it is being stopped"),
    ({"json": {"replica": 10**9}}, 400, "replica"),
    ({"json": {"replica": -1}}, 400, "replica"),
    ({"json": {"replica": "1"}}, 400, "replica"),
    ({"json": {"replica": True}}, 400, "replica"),
    ({"json": {"replicas": 1}}, 400, "replicas"),
    ({"json": []}, 400, ""),
    ({"content": b"{", "headers": {"Content-Type": "application/json", **ADMIN}}, 400, "JSON"),
    ({"content": b"replica=1"}, 415, "Content-Type"),
]


def test_a_target_that_cannot_be_is_refused_in_words_and_changes_nothing(start, threads):
    replicas = FakeReplicas(stay, stopped=("b",))
    server = start(replicas, api_keys=KEYS)
    _, reading = begin(threads, server)
    name = listed(server)[0]["id"]
    answers = [move(server, name, **body) for body, _, _ in NO_TARGETS]
    stranger = move(server, name, STRANGER, json={"replica": 2})
    (shown,), (sent, aborted) = listed(server), (len(replicas.requests), list(replicas.aborted))
    moved = move(server, name, json={"replica": None})
    reading.result(patience(120))
    for (_, status, words), answer in zip(NO_TARGETS, answers, strict=True):
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
    assert (stranger.status_code, sent, aborted, shown["not_movable"]) == (403, 1, [], None)
    assert moved.status_code == 202, "no replica in particular"


def test_it_may_be_moved_back(start, threads):
    async def restless(request: GenerateRequest) -> AsyncIterator[Any]:
        async for output in speak(request):
            yield output
            if not output.finished:
                await asyncio.Event().wait()

    replicas = FakeReplicas(restless)
    server = start(replicas, api_keys=KEYS)
    _, reading = begin(threads, server)
    for number in (1, 2):
        wait_until(lambda number=number: listed(server)[0]["tokens"] == number)
        assert move(server, listed(server)[0]["id"]).status_code == 202
        wait_until(lambda number=number: len(replicas.requests) == number + 1)
    reading.result(patience(120))
    assert [request.progress.replica for request in replicas.requests] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("more", "most_tokens", "words"),
    [
        ({"n": 2, "temperature": 1}, 100, "several answers"),
        ({"stream": False}, 100, "not streamed"),
        ({}, 10, "longer than 10 tokens, or nearly"),
        ({"echo": True, "logprobs": 1}, 100, "logprobs of its prompt"),
    ],
    ids=["several", "whole", "too long", "prompt logprobs"],
)
def test_what_cannot_be_moved_is_refused_in_words_and_goes_on(
    start, threads, monkeypatch, more, most_tokens, words: str
):
    monkeypatch.setattr(generated_tokens, "MOST_TOKENS", most_tokens)
    free = threading.Event()

    async def held(request: GenerateRequest) -> AsyncIterator[Any]:
        outputs = speak(request)
        if request.sampling_params.output_kind.name == "DELTA":
            yield await anext(outputs)
        while not free.is_set():  # noqa: ASYNC110 - it is set on another thread
            await asyncio.sleep(0.01)
        async for output in outputs:
            yield output

    server = start(FakeReplicas(held), api_keys=KEYS)
    stream = Streaming(server, "/v1/completions", **more)
    reading = threads.submit(stream.read)
    wait_until(lambda: len(listed(server)) == 1 and (stream.begun.is_set() or not more.get("stream", True)))
    (shown,) = listed(server)
    assert words in shown["not_movable"]
    answer = move(server, shown["id"])
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (409, True)
    free.set()
    reading.result(patience(120))
    assert stream.error == ""


def test_without_another_replica_it_stays(start, threads):
    replicas = FakeReplicas(stay, names=("a",))
    server = start(replicas, api_keys=KEYS)
    with ThreadPoolExecutor():
        _, _reading = begin(threads, server)
        answer = move(server, listed(server)[0]["id"])
        assert (answer.status_code, "no other replica" in answer.json()["error"]["message"]) == (409, True)
        replicas.names = ("a", "b")
        assert move(server, listed(server)[0]["id"]).status_code == 202


def test_no_client_chooses_an_id_by_which_its_stream_cannot_be_moved(start, threads):
    server = start(FakeReplicas(stay), api_keys=KEYS)
    stream, reading = begin(threads, server, request_id="a/../b?c#d%2f\\e")
    assert move(server, listed(server)[0]["id"]).status_code == 202
    reading.result(patience(120))
    assert (stream.text, stream.error) == (" one two three", "")


def test_a_name_that_two_have_is_ambiguous(start, threads):
    replicas = FakeReplicas(stay)
    server = start(replicas, api_keys=KEYS)
    for _ in range(2):
        begin(threads, server, request_id="twice")
    answer = move(server, "chatcmpl-twice")
    assert (answer.status_code, "2 live requests" in answer.json()["error"]["message"]) == (409, True)
    for shown in listed(server):
        assert move(server, shown["id"]).status_code == 202


@pytest.mark.parametrize("headers", [STRANGER, {}], ids=["another tenant", "nobody"])
def test_only_an_administrator_sees_and_moves(start, threads, headers: dict[str, str]):
    replicas = FakeReplicas(stay)
    server = start(replicas, api_keys=KEYS)
    _, reading = begin(threads, server)
    name = listed(server)[0]["id"]
    wanted = 403 if headers else 401
    with server.http() as client:
        assert client.get("/api/v1/requests", headers=headers).status_code == wanted
    assert move(server, name, headers).status_code == wanted
    assert move(server, "no-such-request", headers).status_code == wanted, "nobody learns which ids there are"
    assert len(replicas.requests) == 1
    move(server, name)
    reading.result(patience(120))


def test_an_unknown_id_is_404_whatever_it_looks_like(start):
    server = start(FakeReplicas(speak), api_keys=KEYS)
    for name in ("nothing", "%2e%2e", "a" * 4000, "%00", "chatcmpl-"):
        answer = move(server, name)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"]


def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_behind(start, threads):
    async def silent_elsewhere(request: GenerateRequest) -> AsyncIterator[Any]:
        if request.progress.replica == "a":
            yield say(request, [10], " one", finished=False)
        await asyncio.Event().wait()

    replicas = FakeReplicas(silent_elsewhere)
    server = start(replicas, api_keys=KEYS)
    stream = Streaming(server)
    with server.http() as client, client.stream("POST", stream._path, json=stream._body, headers=ADMIN) as answer:
        lines = answer.iter_lines()  # httpx closes the answer with it
        next(lines)
        wait_until(lambda: listed(server)[0]["tokens"] == 1)
        assert move(server, listed(server)[0]["id"]).status_code == 202
        wait_until(lambda: len(replicas.requests) == 2)
    wait_until(lambda: replicas.requests[1].request_id in replicas.aborted)
    check_all_is_free(server)
    assert listed(server) == []


@pytest.mark.parametrize(
    ("told", "shown"),
    [("chatcmpl-a-1", "chatcmpl-a-1"), ("cmpl-a-0", "cmpl-a"), ("cmpl-a-b-12", "cmpl-a-b"), ("cmpl-0", "cmpl-0")],
)
def test_what_the_client_sees_of_an_id(told: str, shown: str):
    assert answer_id(told) == shown
