"""1 → 2 → 1 replicas under streams, on a real server: none is broken, none is wrong, hits survive, /health is right."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from load_tests.harness.client import Client
from load_tests.harness.conversations import complete
from load_tests.harness.engine import prompt
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer, ServerError

pytestmark = [
    pytest.mark.server,
    pytest.mark.long("tests/app/backend/test_scaling_over_serve.py"),
]

SETTINGS = {
    "dtype": "float32",
    "replicas": {"min": 1, "max": 2},
    "scaling": {"upscale_delay_s": 1, "downscale_delay_s": 5},
    "engine": {"max_num_seqs": 4},
    "kv": {"redis_url": None},
}
ANSWER_TOKENS = 160
"""A stream shorter than `http.drain_s`."""
CHANGED_S = 180.0
BLOCK_TOKENS = 32


class Watch:
    """What /health has said, on a thread of its own."""

    def __init__(self, server: RunningServer) -> None:
        self.running: list[list[int]] = []
        self.unwell: list[Any] = []
        self._server = server
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ends.wait(0.25):
            try:
                health = self._server.health()
            except (httpx.HTTPError, ServerError) as error:
                self.unwell.append(error)
                continue
            running = health["parts"].get("replicas", {}).get("running")
            if running is not None and self.running[-1:] != [running]:
                self.running.append(running)
            if health["status"] != "ok":
                self.unwell.append(health)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


class Streams:
    """So many greedy streams at any time, each compared with what an undisturbed engine has answered."""

    def __init__(self, client: httpx.AsyncClient, answers: list[tuple[list[int], list[int]]]) -> None:
        self.wanted = 0
        self.right = 0
        self.wrong: list[Any] = []
        self.broken: list[Any] = []
        self._client = client
        self._answers = itertools.cycle(answers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            while len(self._tasks) < self.wanted:
                task = asyncio.create_task(self._read(*next(self._answers)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0.02)

    async def _read(self, asked: list[int], expected: list[int]) -> None:
        body = {
            "model": "demo", "prompt": asked, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        tokens, done = [], False
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        for choice in event.get("choices", ()):
                            tokens += choice.get("token_ids") or []
        except httpx.HTTPError as error:
            self.broken.append(error)
            return
        if not done or len(tokens) != ANSWER_TOKENS:
            self.broken.append((response.status_code, len(tokens)))
        elif tokens != expected:
            self.wrong.append((asked[:5], tokens, expected))
        else:
            self.right += 1

    async def end(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(*self._tasks)


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + patience(CHANGED_S)
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("private_server", [SETTINGS], indirect=True, ids=["scaling"])
def test_replicas_come_and_go_under_streams_and_nothing_is_lost(private_server: RunningServer) -> None:
    server = private_server
    server.wait_until(lambda: server.part("replicas")["running"] == [0], "it has its number", 60.0)
    watch = Watch(server)

    async def scenario() -> Streams:
        async with Client(server.url, "demo", timeout_s=patience(120)) as client:
            asked = [prompt(6000 + number, 150 + 90 * number) for number in range(6)]
            turns = [await complete(client, tokens, ANSWER_TOKENS) for tokens in asked]
            streams = Streams(client.http, [(turn.prompt, turn.answer) for turn in turns])
            streams.wanted = 8
            await until(lambda: watch.running[-1:] == [[0, 1]], "a second replica has come")
            documents = [prompt(6100 + pin, 900) for pin in (0, 1)]
            for pin, document in enumerate(documents):
                first = await complete(client, document, 8, pin=pin)
                assert first.kv_cache["replica"] == str(pin)
                assert first.kv_cache["recomputed"] > 0
            streams.wanted = 1
            await until(lambda: watch.running[-1:] == [[0]], "one of them has gone")
            for document in documents:
                again = await complete(client, document, 8)
                assert again.kv_cache["replica"] == "0"
                assert again.kv_cache["recomputed"] <= 4 * BLOCK_TOKENS, again.kv_cache
            right = streams.right
            await until(lambda: streams.right > right + 1, "it serves on")
            await streams.end()
            return streams

    try:
        streams = asyncio.run(scenario())
    finally:
        watch.end()

    assert (streams.broken, streams.wrong) == ([], [])
    assert streams.right > 8
    assert watch.unwell == []
    assert watch.running == [[0], [0, 1], [0]]
    assert server.metric("crosskv_replicas_changed_total", direction="up") == 1
    assert server.metric("crosskv_replicas_changed_total", direction="down", why="fits") == 1
    assert server.metric("crosskv_replicas_target") == 1
    assert server.metric("crosskv_replicas_ended_total") == 0
