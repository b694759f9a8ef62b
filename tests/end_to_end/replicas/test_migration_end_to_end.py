"""Streams whose replica is killed, or that are moved, by hand or for want of KV: each answer is the undisturbed one.

In float32.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import httpx
import pytest

from load_tests.faults.catalogue import FAULTS, World
from load_tests.faults.streams import Stream, run_stream, run_streams
from load_tests.harness.client import Client
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

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


@pytest.mark.long("tests/end_to_end/test_faults.py::test_a_fault_costs_no_token_and_no_request_and_the_part_rejoins")
@pytest.mark.long("tests/deployments/engine/resume/test_continuation.py")
def test_a_killed_replica_breaks_no_stream_and_changes_no_token(world: World, server: RunningServer) -> None:
    server.wait_until(lambda: server.health()["status"] == "ok", "all is well", 90)
    answers = asyncio.run(undisturbed(server.url))
    assert all(answer.ended and len(answer.tokens) > 30 for answer in answers)
    server.clear("device", "cpu", "redis")
    resumed = server.metric(RESUMED)
    (fault,) = [each for each in FAULTS if each.name == "killed mid-stream"]

    async def struck() -> list[Stream]:
        streams = [Stream(prompt) for prompt, _ in asked()]
        async with Client(server.url, "demo", timeout_s=patience(120)) as client:
            running = [
                asyncio.create_task(run_stream(client, stream, ANSWER_TOKENS, more))
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


def test_a_stream_that_is_moved_to_a_named_replica_says_what_it_would_have_said(server: RunningServer) -> None:
    server.wait_until(lambda: server.health()["status"] == "ok", "all is well", 90)
    (prompt, more), tokens = asked()[PROMPTS], 1_000  # a client that is late still finds it under way
    (answer,) = asyncio.run(run_streams(server.url, "demo", [prompt], tokens, more))

    async def moved() -> tuple[Stream, dict[str, Any], httpx.Response]:
        async with Client(server.url, "demo", timeout_s=patience(120)) as client:
            stream = Stream(prompt)
            running = asyncio.create_task(run_stream(client, stream, tokens, more))
            await stream.begun.wait()
            (shown,) = (await client.http.get("/api/v1/requests")).json()["requests"]
            url = f"/api/v1/requests/{shown['id']}/move"
            refused = [await client.http.post(url, json={"replica": rank}) for rank in (shown["replica"], 9)]
            assert [answer.status_code for answer in refused] == [409, 404]
            order = await client.http.post(url, json={"replica": 1 - shown["replica"]})
            while (now := (await client.http.get("/api/v1/requests")).json()["requests"]) and not now[0]["resumed"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await running
            return stream, {**shown, "at": now[0]["replica"] if now else None}, order

    stream, shown, order = asyncio.run(moved())
    assert order.status_code == 202
    assert order.json()["source"] == shown["replica"] == 1 - shown["at"]
    assert (stream.error, stream.ended, stream.tokens == answer.tokens) == ("", True, True)
    assert server.metric(RESUMED, reason="moved") == 1


@pytest.mark.long("tests/app/continuation/test_rebalancing_streams.py")
@pytest.mark.long("tests/kvmanager/scheduling/test_rebalancing.py")
def test_a_long_stream_leaves_a_replica_that_is_short_of_kv_and_says_what_it_would_have_said(
    server: RunningServer,
) -> None:
    server.wait_until(lambda: server.health()["status"] == "ok", "all is well", 90)
    rng = Random(20)
    prompt, *others = ([rng.randrange(100, 500) for _ in range(length)] for length in (1_000, *[2_000] * 3))
    more, tokens = KINDS["seeded"], 2_000
    (answer,) = asyncio.run(run_streams(server.url, "demo", [prompt], tokens, more))
    moved = server.metric(RESUMED, reason="rebalanced")

    async def crowded() -> tuple[Stream, int | None, int | None]:
        async with Client(server.url, "demo", timeout_s=patience(240)) as client:

            async def where() -> int | None:
                """None: on its way, or ended."""
                shown = (await client.http.get("/api/v1/requests")).json()["requests"]
                return next((one["replica"] for one in shown if one["prompt_tokens"] == len(prompt)), None)

            stream = Stream(prompt)
            running = asyncio.create_task(run_stream(client, stream, tokens, more))
            await stream.begun.wait()
            source = at = await where()
            # Requests that are pinned cannot move. With them the replica holds nine tenths of its blocks, and more.
            crowd = [asyncio.create_task(run_stream(client, Stream(one), tokens, pin=source)) for one in others]
            while at in (source, None) and not running.done():
                await asyncio.sleep(0.1)
                at = await where()
            for each in crowd:
                each.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            await running
            return stream, source, at

    stream, source, at = asyncio.run(crowded())
    assert {source, at} == {0, 1}
    assert (stream.error, stream.ended, stream.tokens == answer.tokens) == ("", True, True)
    assert server.metric(RESUMED, reason="rebalanced") == moved + 1
    server.wait_until_idle()
