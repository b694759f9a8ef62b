"""A replica is killed under its streams, or a stream is moved by hand: each answer is the undisturbed one (float32)."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import httpx
import pytest

from load_tests.faults.catalogue import FAULTS, World
from load_tests.faults.streams import Stream, run_stream, run_streams
from load_tests.harness.running_server import RunningServer

pytestmark = pytest.mark.server

ANSWER_TOKENS = 240
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.8, "repetition_penalty": 1.1},
    "structured": {"structured_outputs": {"regex": "([a-z]{3} [0-9]{2};){12}"}, "ignore_eos": False},
}
PROMPTS = 2
"""Of each kind."""
RESUMED = "crosskv_resumed_prompts_total"


def asked() -> list[tuple[list[int], dict[str, Any]]]:
    rng = Random(19)
    return [
        ([rng.randrange(100, 500) for _ in range(rng.randrange(40, 400))], more)
        for more in KINDS.values()
        for _ in range(PROMPTS)
    ]


async def undisturbed(url: str) -> list[Stream]:
    return [(await run_streams(url, "demo", [prompt], ANSWER_TOKENS, more))[0] for prompt, more in asked()]


def same(streams: list[Stream], answers: list[Stream]) -> bool:
    return [stream.tokens for stream in streams] == [answer.tokens for answer in answers]


def test_a_killed_replica_breaks_no_stream_and_changes_no_token(world: World, server: RunningServer) -> None:
    server.wait_until(lambda: server.health()["status"] == "ok", "all is well", 90)
    answers = asyncio.run(undisturbed(server.url))
    assert all(answer.ended and len(answer.tokens) > 30 for answer in answers)
    server.clear("device", "cpu", "redis")
    resumed = server.metric(RESUMED)
    (fault,) = [each for each in FAULTS if each.name == "killed mid-stream"]

    async def struck() -> list[Stream]:
        streams = [Stream(prompt) for prompt, _ in asked()]
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            running = [
                asyncio.create_task(run_stream(client, "demo", stream, ANSWER_TOKENS, more))
                for stream, (_, more) in zip(streams, asked(), strict=True)
            ]
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            with fault.inject(world):
                await asyncio.gather(*running)
        return streams

    streams = asyncio.run(struck())
    assert [stream.error for stream in streams] == [""] * len(streams)
    assert all(stream.ended for stream in streams)
    assert same(streams, answers)
    assert server.metric(RESUMED) > resumed, "some of them ran on the replica that was killed"
    counts = [[stream.kv_cache[tier] for tier in ("device", "cpu", "redis", "recomputed")] for stream in streams]
    assert [sum(count) for count in counts] == [len(stream.prompt) for stream in streams]
    server.wait_until(lambda: server.health()["status"] == "ok", "the replica is replaced", 90)


def test_a_stream_that_is_moved_by_hand_says_what_it_would_have_said(server: RunningServer) -> None:
    server.wait_until(lambda: server.health()["status"] == "ok", "all is well", 90)
    (prompt, more), tokens = asked()[PROMPTS], 200
    (answer,) = asyncio.run(run_streams(server.url, "demo", [prompt], tokens, more))

    async def moved() -> tuple[Stream, dict[str, Any], httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            stream = Stream(prompt)
            running = asyncio.create_task(run_stream(client, "demo", stream, tokens, more))
            await stream.begun.wait()
            (shown,) = (await client.get("/api/v1/requests")).json()["requests"]
            order = await client.post(f"/api/v1/requests/{shown['id']}/move")
            while (now := (await client.get("/api/v1/requests")).json()["requests"]) and not now[0]["resumed"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await running
            return stream, {**shown, "at": now[0]["replica"] if now else None}, order

    stream, shown, order = asyncio.run(moved())
    assert order.status_code == 202
    assert order.json()["source"] == shown["replica"] != shown["at"]
    assert (stream.error, stream.ended, stream.tokens == answer.tokens) == ("", True, True)
    assert server.metric(RESUMED, reason="moved") == 1
