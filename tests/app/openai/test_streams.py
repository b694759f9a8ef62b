"""Streams: kept alive while nothing comes, ended by silence or by their length, and not by what others may take."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from failed_replicas import STOPPED, check_all_is_free, leave
from fake_backend import FakeReplicas, say, speak, speak_for_ever, think_for_ever
from ingress_server import CHAT, COMPLETION, MOST_TRIALS, wait_until

from app import ingress
from deployments.protocol.wire import GenerateRequest

PATHS = ["/v1/chat/completions", "/v1/completions"]


class Held:
    """A script that does nothing until it is let go, and then speaks or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.free = threading.Event()
        self._error = error

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[Any]:
        while not self.free.is_set():  # noqa: ASYNC110 - it is set on another thread
            await asyncio.sleep(0.01)
        if self._error is not None:
            raise self._error
        async for output in speak(request):
            yield output


def body(path: str) -> dict[str, Any]:
    return {**(CHAT if "chat" in path else COMPLETION), "stream": True}


def events_of(lines: list[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("path", PATHS)
def test_headers_and_comments_go_out_while_a_prompt_waits(kept_alive: Callable[..., Any], path: str) -> None:
    held = Held()
    server = kept_alive(FakeReplicas(held))
    with server.http() as client, client.stream("POST", path, json=body(path)) as answer:
        assert answer.status_code == 200
        lines, comments = [], 0
        for line in answer.iter_lines():
            lines.append(line)
            comments += line == ": keep-alive"
            if comments == 3:
                held.free.set()
    assert lines[0] == ": keep-alive"
    assert events_of(lines)[-1] == "[DONE]"
    assert sum(word in "".join(events_of(lines)) for word in (" one", " two", " three")) == 3


def test_the_official_client_does_not_see_the_comments(kept_alive: Callable[..., Any]) -> None:
    held = Held()
    server = kept_alive(FakeReplicas(held))
    stream = server.client().chat.completions.create(**CHAT, stream=True)  # returns with the headers
    held.free.set()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == " one two three"


@pytest.mark.parametrize("path", PATHS)
def test_what_fails_after_the_headers_is_an_error_event(kept_alive: Callable[..., Any], path: str) -> None:
    held = Held(STOPPED)
    server = kept_alive(FakeReplicas(held))
    with server.http() as client, client.stream("POST", path, json=body(path)) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            held.free.set()
    assert answer.status_code == 200
    *_, failure, done = events_of(lines)
    assert (json.loads(failure)["error"]["code"], done) == ("service_unavailable", "[DONE]")
    check_all_is_free(server)


def test_a_client_that_leaves_a_kept_alive_stream_has_its_request_aborted(
    kept_alive: Callable[..., Any],
) -> None:
    replicas = FakeReplicas(think_for_ever)
    server = kept_alive(replicas)
    with server.http() as client, client.stream("POST", PATHS[0], json=body(PATHS[0])) as answer:
        assert next(answer.iter_lines()) == ": keep-alive"
    wait_until(lambda: replicas.aborted == [replicas.requests[0].request_id])
    check_all_is_free(server)


def test_a_client_that_leaves_before_the_headers_has_its_request_aborted(start: Callable[..., Any]) -> None:
    replicas = FakeReplicas(think_for_ever)
    server = start(replicas)
    leave(server.url, body(PATHS[0]), until=lambda: replicas.requests)
    wait_until(lambda: replicas.aborted == [replicas.requests[0].request_id])
    check_all_is_free(server)


async def speak_long(request: GenerateRequest) -> AsyncIterator[Any]:
    for number in range(60):
        await asyncio.sleep(0.03)
        yield say(request, [10], " word", finished=number == 59)


def test_a_healthy_stream_may_take_longer_than_other_requests(start: Callable[..., Any]) -> None:
    server = start(FakeReplicas(speak_long), request_timeout_s=1.0)
    with server.http() as client:
        for _ in range(MOST_TRIALS):  # a machine that stands still for a second makes a silence of it
            answer = client.post(PATHS[1], json=body(PATHS[1]))
            if answer.status_code == 200 and "error" not in answer.text:
                break
    assert answer.text.count(" word") == 60
    assert "error" not in answer.text


async def fall_silent(request: GenerateRequest) -> AsyncIterator[Any]:
    yield say(request, [10], " word", finished=False)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "silence_s", "length_s"),
    [
        (fall_silent, 1.0, 3600.0),
        (speak_for_ever, 30.0, 1.0),
    ],
    ids=["silent", "too long"],
)
def test_a_stream_ends_by_its_silence_and_by_its_length(
    start: Callable[..., Any], script: Any, silence_s: float, length_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "STREAM_TIMEOUT_S", length_s)
    replicas = FakeReplicas(speak)
    server = start(replicas, request_timeout_s=silence_s)
    with server.http() as client:
        client.post(PATHS[0], json=body(PATHS[0]))  # the first request of a server is its slowest
        replicas.script = script
        for _ in range(MOST_TRIALS):  # a machine that stands still may take all of its time before the first word
            answer = client.post(PATHS[0], json=body(PATHS[0]))
            if answer.status_code == 200 and " word" in answer.text:
                break
    *_, failure, done = events_of(answer.text.splitlines())
    assert (json.loads(failure)["error"]["code"], done) == ("service_unavailable", "[DONE]")
    assert "too long" in json.loads(failure)["error"]["message"]
    wait_until(lambda: replicas.requests[-1].request_id in replicas.aborted)
    check_all_is_free(server)


def test_a_stream_that_is_silent_from_the_begin_is_a_status_where_nothing_has_been_sent(
    start: Callable[..., Any],
) -> None:
    server = start(FakeReplicas(think_for_ever), request_timeout_s=0.2)
    with server.http() as client:
        assert client.post(PATHS[0], json=body(PATHS[0])).status_code == 503
